"""The cluster as a decision sees it: workers, and the pools of those that have one model and role. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.policy.roles import Role


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker held at its last report."""

    running: int
    waiting: int
    waiting_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker that could be moved, as it was over a window."""

    id: str
    incarnation: int
    model: str
    role: Role | None
    """None: it has none that is known here."""
    epoch: int
    """Of its assignment; a move is compare-and-set on it."""
    gpus: int
    """Its weight: a CPU worker counts 1."""
    movable: bool
    """Whether it takes new work, and so could take another role."""
    load: WorkerLoad | None
    """None while its present incarnation has sent nothing."""
    covered_ns: int
    """Of the window, what its telemetry tells of."""
    busy_ns: int
    """Of that, what it spent in steps."""


@dataclass(frozen=True, slots=True)
class RolePool:
    """The workers of one model in one role. Depths are sums over those that report them."""

    model: str
    role: Role | None
    workers: tuple[PlannedWorker, ...]
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
    pools: tuple[RolePool, ...]
    coverage: float
    """Share of all registered GPU time in the window that telemetry tells of, 0..1; 0 without workers."""

    @property
    def at_rest(self) -> bool:
        """Whether all that is known of the window is that nothing ran or waited, and all of it is known."""
        return all(
            pool.coverage == 1 and not (pool.busy or pool.running or pool.waiting or pool.waiting_prefill_tokens)
            for pool in self.pools
        )


def cluster_snapshot(workers: Sequence[PlannedWorker], window_ns: int) -> ClusterSnapshot:
    """Workers as they were over a window, in pools."""
    by_key: dict[tuple[str, int], list[PlannedWorker]] = {}
    for worker in workers:
        by_key.setdefault((worker.model, worker.role or 0), []).append(worker)
    pools = tuple(_pool(tuple(members), window_ns) for _, members in sorted(by_key.items()))
    return ClusterSnapshot(window_ms=window_ns // 1_000_000, pools=pools, coverage=_coverage(workers, window_ns))


def _pool(workers: tuple[PlannedWorker, ...], window_ns: int) -> RolePool:
    covered_ns = sum(worker.covered_ns * worker.gpus for worker in workers)
    busy_ns = sum(worker.busy_ns * worker.gpus for worker in workers)
    loads = [worker.load for worker in workers if worker.load is not None]
    return RolePool(
        model=workers[0].model,
        role=workers[0].role,
        workers=workers,
        gpus=sum(worker.gpus for worker in workers),
        busy=busy_ns / covered_ns if covered_ns else None,
        coverage=_coverage(workers, window_ns),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        waiting_prefill_tokens=sum(load.waiting_prefill_tokens for load in loads),
    )


def _coverage(workers: Iterable[PlannedWorker], window_ns: int) -> float:
    covered_ns = gpus = 0
    for worker in workers:
        covered_ns += worker.covered_ns * worker.gpus
        gpus += worker.gpus
    return covered_ns / (gpus * window_ns) if gpus else 0.0
