from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport
from libs.stores.catalogue.entry import ModelEntry
from libs.stores.catalogue.port import ModelCatalogue
from libs.stores.registry.port import Registry
from services.planner.http.admin import Admin
from services.planner.models.api import ModelsApi
from services.planner.models.keeper import Knobs, ModelKeeper
from services.planner.models.loop import ModelLoop
from services.planner.settings import PlannerSettings
from services.planner.state import PlannerState

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
) -> APIRouter:
    """Start keeping the pool to the catalogue and return the routes that show and change it. Raise StartupError."""
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
        acts=lambda: bool(token) and state.identity.mode == MODE_AUTO,
        targets=state.take_model_targets,
    )
    metrics.register(ModelsCollector(keeper, clock))
    loop.start(registry, seed)
    return ModelsApi(keeper, store, admin, clock).router()


class ModelsCollector(Collector):
    """The pool's metrics, read at each scrape."""

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
