import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Final

from fastapi import APIRouter, FastAPI, Query
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import MAX_QUOTED_CHARS, DecisionNotFound, InvalidRequest
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, WorkerState
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP
from libs.contracts.protocol import Unpaired
from libs.contracts.roles import role_name
from libs.runtime.clock import Clock
from libs.runtime.web import make_web_app
from libs.telemetry.lives import WorkerLife
from services.planner.executor import CallOutcome, OrderExecutor
from services.planner.fleet_view import ObservedWorker, by_planner, gpus_of
from services.planner.http.admin import ModeApi
from services.planner.http.answers import DecisionAnswer, PlannerAnswer, decision_answer, planner_answer
from services.planner.http.limits_api import LimitsApi
from services.planner.kept import Lead
from services.planner.messages import NS_PER_MS, action_word, seen
from services.planner.regret import MAX_HOURS, RegretLedger
from services.planner.state import PlannerState

_WINDOW: Final = re.compile(r"([0-9]{1,4})(m|h)", re.ASCII)
_UNIT_NS: Final = {"m": 60_000_000_000, "h": 3_600_000_000_000}


@dataclass(frozen=True, slots=True)
class RegretAnswer:
    """GPU-hours of work that another split would have served in time, by a closed form over the observed demand.

    Partial hours count as whole ones. `too_small` is work that no split of the available workers would have served; it
    is not part of `lost_gpu_hours`.
    """

    method: str
    window_s: float
    gpu_hours: float
    lost_gpu_hours: float
    by_cause: dict[str, float]
    by_model: dict[str, dict[str, float]]


def regret_router(ledger: RegretLedger, clock: Clock) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/regret")
    async def regret(
        window: Annotated[str, Query(description="A duration in m or h, up to 48h.")] = "24h",
    ) -> RegretAnswer:
        """Return what was lost against the split that hindsight shows to be best."""
        found = _WINDOW.fullmatch(window)
        window_ns = int(found[1]) * _UNIT_NS[found[2]] if found else 0
        if not 0 < window_ns <= MAX_HOURS * _UNIT_NS["h"]:
            raise InvalidRequest(
                f"window={window[:40]!r} is not a number and m or h, up to {MAX_HOURS}h", param="window"
            )
        lost = ledger.regret(clock.now_ns(), window_ns)
        return RegretAnswer(
            lost.method, lost.window_s, lost.gpu_hours, lost.lost_gpu_hours, lost.by_cause, lost.by_model
        )

    return router


MAX_LIMIT = 1_000
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="How many decisions, the newest first.")]


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A registered worker. Depths and counts are null until its telemetry arrives.

    `moves` counts its changes of role since it started. `moved_*` describe the last one and are 0 and empty before
    it. A decode worker that the planner lends prompts to keeps role decode and has a budget. A worker whose budget was
    set at its start or by a person is mixed. `unpaired` says why a worker gets no work because no
    worker of the other phase has compatible KV; otherwise it is empty.
    """

    id: str
    pid: int
    node: str
    role: str
    budget_tokens: int
    engine: str
    model: str
    device: str
    gpus: int
    epoch: int
    started_unix_ns: int
    moves: int
    moved_unix_ns: int
    moved_by: str
    moved_because: str
    state: str
    unpaired: str
    running: int | None
    waiting: int | None
    preemptions: int | None
    recomputed_tokens: int | None
    pool_faults: int | None
    address: str
    group: str
    """The data-parallel group whose ranks share one role; empty for a single worker."""
    coverage: float
    cpu_wait: float | None
    """The share of the worker's time in which it waits for a CPU, 0 to 1; null if it does not report it."""
    life: str
    """The same as in `/v1/status`: starting, running, silent, restarting, gone or back. `state` is what it
    registered.
    """
    life_since_unix_ms: int


def make_api(
    state: PlannerState, clock: Clock, registry: CollectorRegistry, modes: ModeApi, limits: LimitsApi
) -> FastAPI:
    app = make_web_app(
        "Fulcrum planner",
        "Roles of workers, and the decisions behind them.",
        not_ready=lambda: state.not_live(clock.now_ns()),
        metrics=registry,
    )

    @app.get("/v1/workers")
    async def workers() -> list[WorkerAnswer]:
        """Return the registered workers by id, with their latest depths."""
        alone = state.view.roster.alone
        planner_id = state.identity.planner_id
        now_ns = clock.now_ns()
        lives = state.lives(now_ns)
        return [
            _worker(each, planner_id, alone.get(each.worker.id), lives[each.worker.id])
            for each in state.observed(now_ns)
        ]

    @app.get("/v1/planner")
    async def planner() -> PlannerAnswer:
        """Return the planner's mode and the pressure on each model's workers."""
        return planner_answer(state, clock.now_ns())

    @app.get("/v1/decisions")
    async def decisions(limit: Limit = 20) -> list[DecisionAnswer]:
        """Return the last decisions, the newest of them first."""
        return [decision_answer(decision) for decision in islice(reversed(state.decisions), limit)]

    @app.get(
        "/v1/decisions/{decision_id}",
        responses={404: {"description": "no decision has this id, or it is no longer kept"}},
    )
    async def decision(decision_id: str) -> DecisionAnswer:
        """Return one decision by its id or its sequence number."""
        for each in map(decision_answer, reversed(state.decisions)):
            if decision_id in (each.id, str(each.sequence)):
                return each
        shown_id = decision_id[:MAX_QUOTED_CHARS]
        raise DecisionNotFound(f"decision {shown_id} is not kept: GET /v1/decisions lists those that are")

    app.include_router(modes.router())
    app.include_router(limits.router())
    app.include_router(regret_router(state.ledger, clock))
    return app


class PlannerCollector(Collector):
    """The planner's metrics, read from its state at each scrape."""

    def __init__(self, state: PlannerState, clock: Clock, actor: OrderExecutor | None = None) -> None:
        self._state = state
        self._actor = actor
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        now_ns = self._clock.now_ns()
        decided = CounterMetricFamily(names.DECISIONS_TOTAL, "Decisions made.", labels=("action",))
        for action in (ACTION_KEEP, *sorted(self._state.published.keys() - {ACTION_KEEP})):
            decided.add_metric((action_word(action),), self._state.published[action])
        yield decided
        if self._actor is not None:
            calls = CounterMetricFamily(names.PLANNER_CALLS_TOTAL, "Calls that change a worker.", labels=("outcome",))
            for outcome in CallOutcome:
                calls.add_metric((outcome.value,), self._actor.outcomes[outcome])
            yield calls
        outcomes = CounterMetricFamily(names.PLANNER_LOADS_TOTAL, "Load messages received.", labels=("outcome",))
        for taken, count in self._state.view.taken.items():
            outcomes.add_metric((taken.value,), count)
        yield outcomes
        yield GaugeMetricFamily(names.PLANNER_WORKERS, "Registered workers.", len(self._state.workers))
        alone = len(self._state.view.roster.alone)
        yield GaugeMetricFamily(names.PLANNER_UNPAIRED_WORKERS, "Workers without a peer that has compatible KV.", alone)
        coverage = self._state.snapshot(now_ns).coverage
        yield GaugeMetricFamily(names.PLANNER_COVERAGE_RATIO, "Share of GPU time that telemetry covers.", coverage)
        age_s = self._state.registry_age_ns(now_ns) / 1e9
        leads = GaugeMetricFamily(names.PLANNER_LEADS, "1 if this planner leads.")
        leads.add_metric((), self._state.lead is Lead.OURS)
        yield leads
        yield self._pressures()
        yield GaugeMetricFamily(names.PLANNER_REGISTRY_AGE_SECONDS, "Time since the registry last answered.", age_s)

    def _pressures(self) -> Metric:
        """Return the pressures of all models with sufficient telemetry. They are capped for a phase without workers."""
        found = GaugeMetricFamily(
            names.PLANNER_PRESSURE, "Work over capacity; above 1, requests queue.", labels=("model", "phase")
        )
        for plan in self._state.looked(self._clock.now_ns()):
            now = seen(plan)
            if now is not None:
                found.add_metric((plan.observed.model, "prefill"), now.prompt_pressure)
                found.add_metric((plan.observed.model, "decode"), now.decode_pressure)
        return found


def _worker(observed: ObservedWorker, planner_id: str, alone: Unpaired | None, life: WorkerLife) -> WorkerAnswer:
    worker, assignment = observed.worker, observed.worker.assignment
    # A decode worker with a prompt budget from the planner still counts as a decode worker. Role mixed is set by people
    # only.
    lent = assignment.role == ROLE_MIXED and assignment.budget_tokens > 0 and by_planner(worker, planner_id)
    known = worker.state in WorkerState.values()
    return WorkerAnswer(
        id=worker.id,
        pid=worker.pid,
        node=worker.node,
        role="decode" if lent else role_name(assignment),
        budget_tokens=assignment.budget_tokens,
        engine=worker.engine,
        model=assignment.model,
        device=worker.device,
        gpus=gpus_of(worker),
        epoch=assignment.epoch,
        started_unix_ns=worker.incarnation,
        moves=max(assignment.epoch - 1, 0),
        moved_unix_ns=worker.role_change.unix_ns,
        moved_by=worker.role_change.actor,
        moved_because=worker.role_change.reason,
        state=WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower() if known else "unknown",
        unpaired=str(alone) if alone else "",
        running=observed.load.running if observed.load else None,
        waiting=observed.load.waiting if observed.load else None,
        preemptions=observed.load.preemptions if observed.load else None,
        recomputed_tokens=observed.load.recomputed_tokens if observed.load else None,
        pool_faults=observed.load.pool_faults if observed.load else None,
        address=worker.address,
        group=worker.group,
        coverage=observed.coverage,
        cpu_wait=observed.cpu_wait,
        life=life.state,
        life_since_unix_ms=life.since_ns // NS_PER_MS,
    )
