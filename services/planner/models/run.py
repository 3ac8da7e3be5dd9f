"""The planner's model catalogue: the loops around its keeper, its routes and its metrics."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import structlog
from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import FulcrumError, StaleLead, StartupError
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.reserve.pool import Why
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport
from libs.stores.catalogue import CatalogueDown, ModelCatalogue, ModelEntry, ModelOutlook
from libs.stores.registry import Registry
from libs.worker.admin_client import WorkerAdmin
from services.planner.http.admin import Admin
from services.planner.models.api import ModelsApi
from services.planner.models.keeper import Call, Knobs, ModelKeeper
from services.planner.settings import PlannerSettings
from services.planner.state import PlannerState

log = structlog.get_logger()

PERIOD_S: Final = 0.25
OUTLOOK_LEASE_MS: Final = 5_000
OUTLOOK_RENEW_S: Final = 1.5
CALL_S: Final = 2.0
MAX_CALLS: Final = 64


class ModelLoop:
    """The loops that manage the pool while `leads` returns True, which it does in one planner of a cluster only."""

    def __init__(
        self,
        keeper: ModelKeeper,
        store: ModelCatalogue,
        transport: Transport,
        tasks: TaskOwner,
        clock: Clock,
        *,
        planner_id: str,
        token: str,
        leads: Callable[[], bool],
        term: Callable[[], int],
        outrun: Callable[[], None],
        acts: Callable[[], bool],
        targets: Callable[[Mapping[str, float]], None],
    ) -> None:
        """Create the loops. They call workers only while `acts` returns True.

        `targets` receives the models' TPOT targets in ms. `term` returns the number of the lead, and `outrun` is called
        if a worker has seen a later one.
        """
        self._targets = targets
        self._keeper = keeper
        self._store = store
        self._transport = transport
        self._tasks = tasks
        self._clock = clock
        self._planner_id = planner_id
        self._token = token
        self._leads = leads
        self._term = term
        self._outrun = outrun
        self._acts = acts
        self._calls = 0
        self.news = asyncio.Event()

    def start(self, registry: Registry, seed: list[ModelEntry]) -> None:
        """Start the loops, which run until the owner of the tasks closes them.

        `seed` contains models to add to the catalogue if it lacks them.
        """
        self._tasks.spawn("model catalogue", self._follow_catalogue(seed))
        self._tasks.spawn("model uses", self._follow_uses())
        self._tasks.spawn("model pool", self._follow_workers(registry))
        self._tasks.spawn("model decisions", self._decide_forever())

    async def _follow_catalogue(self, seed: list[ModelEntry]) -> None:
        left = list(seed)
        async for found in self._store.watch():
            if self._leads() and found.is_lost and (known := list(self._keeper.found.entries.values())):
                log.warning("the model catalogue was lost: writing it again", models=len(known))
                left = known
            else:
                self._keeper.take_catalogue(found)
            self._targets(
                {name: each.tpot_ms for name, each in found.entries.items() if each.tpot_ms and not each.parent}
            )
            self.news.set()
            with contextlib.suppress(CatalogueDown):
                if left and self._leads():
                    # In one step, because gateways answer 404 for models that are missing when they read the catalogue.
                    if missing := [each for each in left if each.name not in found.entries]:
                        await self._store.put(*missing)
                    left = []

    async def _follow_uses(self) -> None:
        async for uses in self._store.watch_uses():
            if self._keeper.take_uses(uses, self._clock.now_ns()):
                self.news.set()

    async def _follow_workers(self, registry: Registry) -> None:
        async for workers in registry.watch():
            measured = self._keeper.take_workers(workers, self._clock.now_ns())
            self.news.set()
            if self._leads():
                with contextlib.suppress(CatalogueDown):
                    for name, times in measured.items():
                        await self._store.measured(name, times)

    async def _decide_forever(self) -> None:
        loop = asyncio.get_running_loop()
        said: dict[str, ModelOutlook] = {}
        said_s = 0.0
        while True:
            if self._keeper.found.entries and self._leads():
                if self._acts() and self._calls < MAX_CALLS:
                    for call in self._keeper.decide(self._clock.now_ns()):
                        self._calls += 1
                        self._tasks.spawn(f"model of {call.worker.id}", self._assign(call))
                outlooks = self._keeper.outlooks(self._clock.now_ns())
                if outlooks != said or loop.time() - said_s >= OUTLOOK_RENEW_S:
                    with contextlib.suppress(CatalogueDown):
                        await self._store.publish_outlooks(outlooks, lease_ms=OUTLOOK_LEASE_MS)
                        said, said_s = outlooks, loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self.news.wait()
            self.news.clear()

    async def _assign(self, call: Call) -> None:
        order, entry = call.order, call.entry
        request = pb.AssignModelRequest(
            expected_epoch=call.epoch,
            incarnation=call.worker.incarnation,
            model=order.model,
            source=entry.source if entry else "",
            size_bytes=entry.size_bytes if entry else 0,
            actor=self._planner_id,
            reason=order.why.value,
            forget=order.why is Why.GONE,
            lead_term=self._term(),
        )
        reached = False
        try:
            async with asyncio.timeout(CALL_S):
                channel = self._transport.channel(call.worker.pool.address)
                try:
                    await WorkerAdmin(channel, call.worker.id, self._token).assign_model(request)
                finally:
                    await channel.close()
            reached = True
        except (FulcrumError, TimeoutError, ValueError) as error:
            if isinstance(error, StaleLead):
                self._outrun()
            log.info("a worker could not be given a model", worker=call.worker.id, model=order.model, error=str(error))
        finally:
            self._calls -= 1
            self._keeper.done(call, reached=reached)
            self.news.set()


STATES: Final = ("serving", "loading", "asleep", "disk")


def open_models(
    *,
    store: ModelCatalogue,
    registry: Registry,
    settings: PlannerSettings,
    state: PlannerState,
    admin: Admin,
    transport: Transport,
    tasks: TaskOwner,
    clock: Clock,
    metrics: CollectorRegistry,
    leads: Callable[[], bool],
    term: Callable[[], int],
    outrun: Callable[[], None],
) -> APIRouter:
    """Start managing the pool and return the routes of the catalogue. Raise StartupError."""
    try:
        seed = msgspec.json.decode(settings.models, type=list[ModelEntry])
    except msgspec.MsgspecError as error:
        raise StartupError(f"FULCRUM_PLANNER_MODELS is no list of models: {error}") from None
    knobs = Knobs(
        settings.models_turn_s, settings.models_cold_cost_gpu_s, settings.models_sleep, settings.models_window_s
    )
    keeper = ModelKeeper(knobs)
    token = settings.token.get_secret_value()
    loop = ModelLoop(
        keeper,
        store,
        transport,
        tasks,
        clock,
        planner_id=settings.id,
        token=token,
        leads=leads,
        term=term,
        outrun=outrun,
        acts=lambda: bool(token) and state.identity.mode == MODE_AUTO,
        targets=state.take_model_targets,
    )
    metrics.register(ModelsCollector(keeper, clock))
    loop.start(registry, seed)
    return ModelsApi(keeper, store, admin, clock).router()


class ModelsCollector(Collector):
    """The metrics of the pool, read at each scrape."""

    def __init__(self, keeper: ModelKeeper, clock: Clock) -> None:
        self._keeper = keeper
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        keeper, now_ns = self._keeper, self._clock.now_ns()
        states = [keeper.stands(name, now_ns)[0] for name in keeper.found.entries]
        models = GaugeMetricFamily(names.POOL_MODELS, "Models of the catalogue.", labels=("state",))
        for state in STATES:
            models.add_metric((state,), states.count(state))
        yield models
        switches = CounterMetricFamily(names.POOL_SWITCHES_TOTAL, "Workers given another model.", labels=("why",))
        for why, count in sorted(keeper.switches.items()):
            switches.add_metric((why,), count)
        yield switches
        yield CounterMetricFamily(names.POOL_COLD_STARTS_TOTAL, "Models brought up for requests.", keeper.cold_starts)
        yield CounterMetricFamily(names.POOL_SWITCH_SECONDS_TOTAL, "Spent bringing models up.", keeper.switched_s)
        yield GaugeMetricFamily(names.POOL_ACTIVE_MODELS, "Models with a request in flight.", keeper.follower.active)
