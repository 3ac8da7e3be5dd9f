"""The cluster as a decision sees it: registered workers with what their telemetry tells of a window. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Load, Role, Worker
from libs.telemetry.fleet import Fleet
from libs.telemetry.phase_time import PhaseTime


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A registered worker; `time` is empty and `load` None while its present incarnation has sent nothing."""

    worker: Worker
    load: Load | None
    time: PhaseTime
    coverage: float
    """Share of the window that its telemetry tells of, 0..1."""

    @property
    def movable(self) -> bool:
        """Whether it takes new work and so could take another role."""
        return self.worker.state == WORKER_STATE_READY


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one model in one role. Depths are sums over those that report them."""

    model: str
    role: Role
    workers: tuple[WorkerView, ...]
    gpus: int
    busy: float | None
    """Share of covered GPU time in steps; None without coverage."""
    coverage: float
    """Share of the pool's GPU time in the window that telemetry tells of, 0..1."""
    running: int
    waiting: int
    waiting_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All pools, by model and role."""

    window_ms: int
    pools: tuple[Pool, ...]
    coverage: float
    """Share of all registered GPU time in the window that telemetry tells of, 0..1; 0 without workers."""

    @property
    def at_rest(self) -> bool:
        """Whether all that is known of the window is that nothing ran or waited, and all of it is known."""
        return all(
            pool.coverage == 1 and not (pool.busy or pool.running or pool.waiting or pool.waiting_prefill_tokens)
            for pool in self.pools
        )


def build_snapshot(workers: Iterable[Worker], fleet: Fleet, end_ns: int, window_ns: int) -> ClusterSnapshot:
    """The cluster over the window that ends at `end_ns`."""
    views = [view_worker(worker, fleet, end_ns, window_ns) for worker in workers]
    keys = sorted({(view.worker.assignment.model, view.worker.assignment.role) for view in views})
    pools = tuple(
        _pool(
            model,
            role,
            tuple(
                view for view in views if (view.worker.assignment.model, view.worker.assignment.role) == (model, role)
            ),
            window_ns,
        )
        for model, role in keys
    )
    return ClusterSnapshot(window_ms=window_ns // 1_000_000, pools=pools, coverage=_coverage(views, window_ns))


def view_worker(worker: Worker, fleet: Fleet, end_ns: int, window_ns: int) -> WorkerView:
    """One worker with its telemetry; that of an older incarnation says nothing about it."""
    facts = fleet.roll.facts(worker.id)
    if facts is None or facts.incarnation != worker.incarnation:
        return WorkerView(worker, None, PhaseTime(), 0.0)
    time = fleet.phases(worker.id, end_ns - window_ns, end_ns)
    return WorkerView(worker, facts.load, time, time.covered_ns / window_ns)


def gpus_of(worker: Worker) -> int:
    """Its weight: a CPU worker counts 1."""
    return max(worker.gpus, 1)


def _pool(model: str, role: Role, views: tuple[WorkerView, ...], window_ns: int) -> Pool:
    time = sum((view.time.times(gpus_of(view.worker)) for view in views), PhaseTime())
    loads = [view.load for view in views if view.load is not None]
    return Pool(
        model=model,
        role=role,
        workers=views,
        gpus=sum(gpus_of(view.worker) for view in views),
        busy=(time.prefill_ns + time.decode_ns) / time.covered_ns if time.covered_ns else None,
        coverage=_coverage(views, window_ns),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        waiting_prefill_tokens=sum(load.waiting_prefill_tokens for load in loads),
    )


def _coverage(views: Iterable[WorkerView], window_ns: int) -> float:
    covered_ns = gpus = 0
    for view in views:
        covered_ns += view.time.covered_ns * gpus_of(view.worker)
        gpus += gpus_of(view.worker)
    return covered_ns / (gpus * window_ns) if gpus else 0.0
