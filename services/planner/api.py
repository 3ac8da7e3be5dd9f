"""The routes of the planner."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from fastapi import FastAPI, Query
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.pairing import Unpaired, unpaired
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WorkerState
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, Decision
from libs.contracts.roles import role_name
from libs.policy.planner.moves import ROLE_WORDS
from libs.runtime.clock import Clock
from libs.runtime.web import make_web_app
from services.planner.actions import Actor, Outcome
from services.planner.mode import mode_word
from services.planner.mode_api import ModeApi
from services.planner.observe import ObservedWorker, gpus_of
from services.planner.state import PlannerState, action_word

MAX_LIMIT = 1_000
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="How many decisions, the newest first.")]


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A registered worker. Depths and counts are null until its telemetry tells them.

    `moves` counts its changes of role since it started; `moved_*` tell of the last one, and are 0 and empty before it.
    `unpaired` says why it gets no work, where nobody in the other phase has KV like its own; else it is empty.
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
    coverage: float


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """The workers of a model in a role, as a decision saw them."""

    model: str
    role: str
    workers: int
    gpus: int
    busy: float | None
    running: int
    waiting: int
    waiting_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class AlternativeAnswer:
    """Something that was weighed, and what it would leave: for splits of roles the pressure, else the imbalance.

    Over 1 either is more than a pool can do; an imbalance of 0 is balance.
    """

    name: str
    score: float


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """A decision with its inputs and its reason.

    Actions set_role and set_budget say what a worker was asked for, in mode auto: the epoch is that which it then has.
    Action role_moved tells of a move that was seen, whoever made it, and set_mode of this planner's mode; the worker,
    its role and its epoch are empty and 0 where the action is about none.
    """

    planner_id: str
    sequence: int
    decided_unix_ns: int
    mode: str
    action: str
    reason: str
    actor: str
    worker: str
    role: str
    epoch: int
    window_ms: int
    coverage: float
    pools: list[PoolAnswer]
    alternatives: list[AlternativeAnswer]


def make_api(state: PlannerState, clock: Clock, registry: CollectorRegistry, modes: ModeApi) -> FastAPI:
    """The app over `state`."""
    app = make_web_app(
        "Fulcrum planner",
        "Which worker does what, and why.",
        not_ready=lambda: state.not_live(clock.now_ns()),
        metrics=registry,
    )

    @app.get("/v1/workers")
    async def workers() -> list[WorkerAnswer]:
        """Registered workers, by id, with their latest depths."""
        alone = unpaired(state.workers)
        return [_worker(each, alone.get(each.worker.id)) for each in state.observed(clock.now_ns())]

    @app.get("/v1/decisions")
    async def decisions(limit: Limit = 20) -> list[DecisionAnswer]:
        """The last decisions, the newest first."""
        return [_decision(decision) for decision in islice(reversed(state.decisions), limit)]

    app.include_router(modes.router())
    return app


class PlannerCollector(Collector):
    """The planner's own figures for Prometheus."""

    def __init__(self, state: PlannerState, clock: Clock, actor: Actor | None = None) -> None:
        self._state = state
        self._actor = actor
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """As of this scrape."""
        now_ns = self._clock.now_ns()
        decided = CounterMetricFamily(names.DECISIONS_TOTAL, "Decisions made.", labels=("action",))
        for action in (ACTION_KEEP, *sorted(self._state.told.keys() - {ACTION_KEEP})):
            decided.add_metric((action_word(action),), self._state.told[action])
        yield decided
        if self._actor is not None:
            calls = CounterMetricFamily(names.PLANNER_CALLS_TOTAL, "Calls that change a worker.", labels=("outcome",))
            for outcome in Outcome:
                calls.add_metric((outcome.value,), self._actor.outcomes[outcome])
            yield calls
        yield GaugeMetricFamily(names.PLANNER_WORKERS, "Registered workers.", len(self._state.workers))
        alone = len(unpaired(self._state.workers))
        yield GaugeMetricFamily(names.PLANNER_UNPAIRED_WORKERS, "Those that nobody has KV like.", alone)
        coverage = self._state.snapshot(now_ns).coverage
        yield GaugeMetricFamily(names.PLANNER_COVERAGE_RATIO, "Share of GPU time that telemetry tells of.", coverage)
        age_s = self._state.registry_age_ns(now_ns) / 1e9
        yield GaugeMetricFamily(names.PLANNER_REGISTRY_AGE_SECONDS, "Since the registry answered.", age_s)


def _worker(observed: ObservedWorker, alone: Unpaired | None) -> WorkerAnswer:
    worker, assignment = observed.worker, observed.worker.assignment
    known = worker.state in WorkerState.values()
    return WorkerAnswer(
        id=worker.id,
        pid=worker.pid,
        node=worker.node,
        role=role_name(assignment),
        budget_tokens=assignment.budget_tokens,
        engine=worker.engine,
        model=assignment.model,
        device=worker.device,
        gpus=gpus_of(worker),
        epoch=assignment.epoch,
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
        coverage=observed.coverage,
    )


def _decision(decision: Decision) -> DecisionAnswer:
    return DecisionAnswer(
        planner_id=decision.planner_id,
        sequence=decision.sequence,
        decided_unix_ns=decision.decided_unix_ns,
        mode=mode_word(decision.mode),
        action=action_word(decision.action),
        reason=decision.reason,
        actor=decision.actor,
        worker=decision.worker_id,
        role=role_name(decision.assignment) if decision.worker_id else "",
        epoch=decision.assignment.epoch,
        window_ms=decision.inputs.window_ms,
        coverage=decision.inputs.coverage,
        pools=[
            PoolAnswer(
                model=pool.model,
                role=ROLE_WORDS.get(pool.role, "none"),
                workers=pool.workers,
                gpus=pool.gpus,
                busy=pool.busy if pool.HasField("busy") else None,
                running=pool.running,
                waiting=pool.waiting,
                waiting_prefill_tokens=pool.waiting_prefill_tokens,
            )
            for pool in decision.inputs.pools
        ],
        alternatives=[AlternativeAnswer(each.name, each.score) for each in decision.alternatives],
    )
