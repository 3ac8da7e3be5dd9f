"""From registered workers and their telemetry to what is decided from, and to what is shown. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Assignment, Load, Worker
from libs.policy.planner.snapshot import ClusterSnapshot, PlannedWorker, WorkerLoad, cluster_snapshot
from libs.policy.roles import Role
from libs.telemetry.fleet import Fleet
from libs.telemetry.phase_time import PhaseTime

ROLES: Final[frozenset[int]] = frozenset(Role)
PLANNERS: Final = "planner"
"""With which the names of planners begin where nobody chose another; after a takeover one knows the last one by it."""
HAND_NS: Final = 60_000_000_000
"""A worker keeps the role that a person gave it for so long; longer where it is pinned."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A registered worker; `time` is empty and `load` None while its present incarnation has sent nothing."""

    worker: Worker
    assignment: Assignment
    """The newest that is known: telemetry tells of a change before the registry does."""
    load: Load | None
    time: PhaseTime
    coverage: float
    """Share of the window that its telemetry tells of, 0..1."""


def observe_worker(worker: Worker, fleet: Fleet, end_ns: int, window_ns: int) -> ObservedWorker:
    """One worker with its telemetry; that of an older incarnation says nothing about it."""
    facts = fleet.roll.facts(worker.id)
    if facts is None or facts.incarnation != worker.incarnation:
        return ObservedWorker(worker, worker.assignment, None, PhaseTime(), 0.0)
    time = fleet.phases(worker.id, end_ns - window_ns, end_ns)
    assignment = facts.assignment if facts.assignment.epoch > worker.assignment.epoch else worker.assignment
    return ObservedWorker(worker, assignment, facts.load, time, time.covered_ns / window_ns)


def by_hand(workers: Iterable[Worker], planner_id: str, now_ns: int) -> frozenset[str]:
    """Workers whose last change of role somebody else than this planner, or one of its kind, made of late."""
    return frozenset(
        each.id
        for each in workers
        if each.role_change.actor and not by_planner(each, planner_id) and now_ns - each.role_change.unix_ns < HAND_NS
    )


def by_planner(worker: Worker, planner_id: str) -> bool:
    """Whether a planner, this one or one of its kind, gave it what it has."""
    actor = worker.role_change.actor
    return actor == planner_id or actor.startswith(PLANNERS)


def observe_cluster(workers: Iterable[Worker], fleet: Fleet, end_ns: int, window_ns: int) -> ClusterSnapshot:
    """The cluster over the window that ends at `end_ns`."""
    return observed_cluster((observe_worker(worker, fleet, end_ns, window_ns) for worker in workers), window_ns)


def observed_cluster(observed: Iterable[ObservedWorker], window_ns: int) -> ClusterSnapshot:
    """The same of workers that have been looked at."""
    return cluster_snapshot([_planned(each) for each in observed], window_ns)


def gpus_of(worker: Worker) -> int:
    """Its weight: a CPU worker counts 1."""
    return max(worker.gpus, 1)


def _planned(observed: ObservedWorker) -> PlannedWorker:
    worker, load, time = observed.worker, observed.load, observed.time
    assignment = observed.assignment
    return PlannedWorker(
        id=worker.id,
        incarnation=worker.incarnation,
        model=assignment.model,
        role=Role(assignment.role) if assignment.role in ROLES else None,
        epoch=assignment.epoch,
        gpus=gpus_of(worker),
        movable=worker.state == WORKER_STATE_READY,
        load=None if load is None else WorkerLoad(load.running, load.waiting, load.waiting_prefill_tokens),
        covered_ns=time.covered_ns,
        busy_ns=time.prefill_ns + time.decode_ns,
    )
