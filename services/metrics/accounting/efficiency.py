"""GPU use relative to the peaks by phase and by hardware counters, with the clock offsets of nodes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Final

from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.rollups import RollUps
from libs.telemetry.workers import Members, group_name
from services.metrics.accounting.answer import (
    ClusterOccupancy,
    PhaseUtilisation,
    RoleTime,
    Utilisation,
    WorkerOccupancy,
)
from services.metrics.accounting.occupancy import cluster_occupancy_in_turns
from services.metrics.accounting.scope import Scope

WINDOW_NS: Final = 2_000_000_000
HELD_NS: Final = 1_000_000_000
"""The time for which one computed cluster is reused. Every open page requests its figures each two seconds."""
_OF_WORKER: Final[dict[str, Callable[[WorkerOccupancy], set[str]]]] = {
    "model": lambda worker: {worker.model},
    "pool": lambda worker: {worker.role, *(each.role for each in worker.by_role)},
    "node": lambda worker: {worker.node},
    "group": lambda worker: {group_name(worker.model, worker.group)},
    "worker": lambda worker: {worker.id},
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Efficiency of the workers in a scope over two seconds; null where nothing is known."""

    scope: str
    as_of_unix_ns: int
    utilisation: PhaseUtilisation
    """Means over the time that workers spent in the phase, weighed by GPUs."""
    tensor_active: float | None
    """Share of a second in which tensor cores worked, as a mean of the GPUs on the scope's nodes."""
    dram_active: float | None
    clock_offset_ms: dict[str, float]
    """Estimated lead of each node's clock over the median node's."""


class RecentOccupancy:
    """The cluster's figures of the last two seconds, cached for `HELD_NS`."""

    def __init__(self, fleet: FleetTelemetry, rollups: RollUps, members: Members) -> None:
        self._fleet = fleet
        self._members = members
        self._rollups = rollups
        self._latest: ClusterOccupancy | None = None

    async def as_of(self, end_ns: int) -> ClusterOccupancy:
        """Return the window that ends at `end_ns` or up to `HELD_NS` before."""
        held = self._latest
        if held is None or not 0 <= end_ns - held.as_of_unix_ns < HELD_NS:
            held = self._latest = await cluster_occupancy_in_turns(
                self._fleet, self._rollups, self._members, end_ns, WINDOW_NS
            )
        return held


def efficiency(cluster: ClusterOccupancy, scope: Scope) -> Efficiency:
    """Compute the efficiency of a scope; a worker counts in a pool only for its time there. Pure."""
    of = _OF_WORKER.get(scope.kind)
    workers = [worker for worker in cluster.workers if of is None or scope.name in of(worker)]
    parts = [each for worker in workers for each in _parts(worker, scope)]
    nodes = {worker.node for worker in workers}
    gpus = [gpu for gpu in cluster.hardware if gpu.node in nodes]
    return Efficiency(
        scope=scope.text,
        as_of_unix_ns=cluster.as_of_unix_ns,
        utilisation=PhaseUtilisation(prefill=_mean(parts, "prefill"), decode=_mean(parts, "decode")),
        tensor_active=_mean_of(gpu.tensor_active for gpu in gpus),
        dram_active=_mean_of(gpu.dram_active for gpu in gpus),
        clock_offset_ms={node.node: node.clock_offset_ms for node in cluster.nodes},
    )


def _parts(worker: WorkerOccupancy, scope: Scope) -> list[WorkerOccupancy | RoleTime]:
    """Return the parts of a worker's time that count in a scope."""
    if scope.kind == "pool" and worker.by_role:
        return [each for each in worker.by_role if each.role == scope.name]
    return [worker]


def _mean(parts: Iterable[WorkerOccupancy | RoleTime], phase: str) -> Utilisation:
    used_by = [(part.utilisation.by_phase()[phase], part.gpu_ns) for part in parts if part.utilisation]
    spent = [(used, time.prefill if phase == "prefill" else time.decode) for used, time in used_by]
    return Utilisation(
        mfu=_weighed((used.mfu, time) for used, time in spent),
        mbu=_weighed((used.mbu, time) for used, time in spent),
    )


def _weighed(values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else None


def _mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None
