"""GPU time by phase over a window: of each worker, group, model and the cluster, with use relative to peaks. Pure."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from statistics import mean
from typing import Final, NamedTuple

from libs.perfmodel.utilisation import utilisation
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.rollups import RollUps
from libs.telemetry.steps import PhaseTime
from libs.telemetry.workers import Members, WorkerFacts, group_name
from services.metrics.accounting.answer import (
    ClusterOccupancy,
    EstimatedPrefill,
    GpuTime,
    GroupOccupancy,
    HardwareGpu,
    ModelOccupancy,
    NodeOccupancy,
    PhaseUtilisation,
    PoolOccupancy,
    RoleTime,
    Utilisation,
    WorkerOccupancy,
    kv_used,
    share,
)
from services.metrics.accounting.phase_windows import RoleGpuTime, Total, WindowSpan, WorkerTime, spent_in, total
from services.metrics.accounting.queues import PhaseQueue
from services.metrics.accounting.series import Scope


class KnownParts(NamedTuple):
    """Parts of a worker's idle or prefill GPU-nanoseconds, each at most all of it. Parts of idle may overlap."""

    starved_ns: int = 0
    dummy_ns: int = 0
    encode_ns: int = 0

    def plus(self, other: "KnownParts") -> "KnownParts":
        return KnownParts(*(mine + others for mine, others in zip(self, other, strict=True)))


def groups_of(
    spent: Sequence[WorkerTime], workers: Sequence[WorkerOccupancy], idle: Mapping[str, KnownParts]
) -> list[GroupOccupancy]:
    """Return the groups by model and name.

    `workers` match `spent` in order. `idle` holds the idle parts by id of the workers that this instance reads.
    """
    ranks: dict[tuple[str, str], list[tuple[WorkerTime, WorkerOccupancy]]] = {}
    for time, worker in zip(spent, workers, strict=True):
        if worker.group:
            ranks.setdefault((worker.model, worker.group), []).append((time, worker))
    return [_group(*name, members, idle) for name, members in sorted(ranks.items())]


def _group(
    model: str, name: str, members: Sequence[tuple[WorkerTime, WorkerOccupancy]], idle: Mapping[str, KnownParts]
) -> GroupOccupancy:
    times, ranks = [time for time, _ in members], [worker for _, worker in members]
    whole = total(times)
    known: KnownParts | None = KnownParts()
    for rank in ranks:
        here = idle.get(rank.id)
        known = known.plus(here) if known is not None and here is not None else None
    covered_ns = whole.time.covered_ns
    facts = [time.facts for time in times if time.facts.kv_blocks]
    return GroupOccupancy.of(
        whole,
        model=model,
        group=name,
        scope=f"group:{group_name(model, name)}",
        role=ranks[0].role,
        ranks=[rank.id for rank in ranks],
        running=sum(rank.running for rank in ranks),
        waiting=sum(rank.waiting for rank in ranks),
        waiting_prefill_tokens=sum(rank.waiting_prefill_tokens for rank in ranks),
        awaiting_kv=sum(rank.awaiting_kv for rank in ranks),
        places=sum(rank.places for rank in ranks),
        starved=known and share(known.starved_ns, covered_ns),
        dummy=known and share(known.dummy_ns, covered_ns),
        dummy_gpu_ns=known and known.dummy_ns,
        encode=known and share(known.encode_ns, covered_ns),
        encode_gpu_ns=known and known.encode_ns,
        dummy_steps=sum(rank.dummy_steps for rank in ranks),
        kv_used=kv_used(
            sum(min(each.load.free_kv_blocks, each.kv_blocks) for each in facts), sum(each.kv_blocks for each in facts)
        ),
    )


WORKERS_A_TURN: Final = 100
"""Workers computed between two turns of the event loop, a few ms."""
PartsByRole = Sequence[KnownParts]
"""The parts of each of a worker's roles, in the order of its parts."""


def cluster_occupancy(
    fleet: FleetTelemetry, rollups: RollUps, members: Members, end_ns: int, window_ns: int
) -> ClusterOccupancy:
    """Compute the figures of the last whole windows that end by `end_ns`.

    A worker's time counts for the model that it is assigned to now.
    """
    span = spent_in(fleet, rollups, members, end_ns, window_ns)
    known = [_known_parts(fleet, each) for each in span.workers]
    workers = [_worker(fleet, *each, span) for each in zip(span.workers, known, strict=True)]
    return _cluster(fleet, span, workers, known, end_ns)


async def cluster_occupancy_in_turns(
    fleet: FleetTelemetry,
    rollups: RollUps,
    members: Members,
    end_ns: int,
    window_ns: int,
    *,
    queues: Sequence[PhaseQueue] = (),
    age_ms: int | None = None,
) -> ClusterOccupancy:
    """Compute the same as `cluster_occupancy`, yielding to the event loop every `WORKERS_A_TURN` workers."""
    span = spent_in(fleet, rollups, members, end_ns, window_ns)
    workers, known = list[WorkerOccupancy](), list[PartsByRole | None]()
    for first in range(0, len(span.workers), WORKERS_A_TURN):
        turn = span.workers[first : first + WORKERS_A_TURN]
        known += [_known_parts(fleet, each) for each in turn]  # read once, because it may grow at any turn
        workers += [_worker(fleet, *each, span) for each in zip(turn, known[first:], strict=True)]
        await asyncio.sleep(0)
    return _cluster(fleet, span, workers, known, end_ns, queues=queues, age_ms=age_ms)


def _cluster(
    fleet: FleetTelemetry,
    span: WindowSpan,
    workers: list[WorkerOccupancy],
    known: list[PartsByRole | None],
    end_ns: int,
    *,
    queues: Sequence[PhaseQueue] = (),
    age_ms: int | None = None,
) -> ClusterOccupancy:
    offsets_ns = fleet.clocks.offsets_ns(span.high_ns)
    pools, parts_of = _pools(span.workers), _parts_by_role(span.workers, known)
    whole, everywhere = total(span.workers), _sum(parts_of.values())
    here = {each.id: _sum(parts) for each, parts in zip(workers, known, strict=True) if parts is not None}
    estimate = partial(_estimate, fleet, span)
    return ClusterOccupancy.of(
        whole,
        estimate=estimate([each.id for each in workers]),
        starved=share(everywhere.starved_ns, whole.time.covered_ns),
        dummy=share(everywhere.dummy_ns, whole.time.covered_ns),
        dummy_gpu_ns=everywhere.dummy_ns,
        encode=share(everywhere.encode_ns, whole.time.covered_ns),
        encode_gpu_ns=everywhere.encode_ns,
        window_ms=(span.high_ns - span.low_ns) // 1_000_000,
        as_of_unix_ns=span.high_ns,
        age_ms=age_ms,
        workers=workers,
        groups=groups_of(span.workers, workers, here),
        models=[
            ModelOccupancy.of(
                part, model=model, estimate=estimate([each.id for each in workers if each.model == model])
            )
            for model, part in _parts(span.workers, lambda facts: facts.assignment.model)
        ],
        pools=[
            PoolOccupancy.of(
                part,
                role=role,
                estimate=estimate([each.id for each in workers if each.role == role]),
                starved=share(parts_of[role].starved_ns, part.time.covered_ns),
                dummy=share(parts_of[role].dummy_ns, part.time.covered_ns),
                dummy_gpu_ns=parts_of[role].dummy_ns,
                encode=share(parts_of[role].encode_ns, part.time.covered_ns),
                encode_gpu_ns=parts_of[role].encode_ns,
            )
            for role, part in pools
        ],
        nodes=[
            NodeOccupancy.of(part, node=node, clock_offset_ms=offsets_ns.get(node, 0) / 1e6)
            for node, part in _parts(span.workers, lambda facts: facts.node)
        ],
        queues=list(queues),
        # Relative to the requested end, since whole windows of a long span may end up to a minute earlier.
        hardware=[HardwareGpu(node=seen.node, **asdict(seen.reading)) for seen in fleet.hardware.fresh(end_ns)],
    )


def _estimate(fleet: FleetTelemetry, span: WindowSpan, worker_ids: Sequence[str]) -> EstimatedPrefill | None:
    """Return the bounds of these workers' estimated time; None if it is measured."""
    estimated = [each for each in worker_ids if each in fleet.estimates] if len(fleet.estimates) else []
    return EstimatedPrefill(*fleet.estimates.bounds(estimated, span.low_ns, span.high_ns)) if estimated else None


def since_step_ns(facts: WorkerFacts, last_step_end_ns: int) -> int:
    """Return the time from the end of the last finished step to the end of the worker's telemetry."""
    return max(facts.covered_to_unix_ns - last_step_end_ns, 0)


def _worker(fleet: FleetTelemetry, spent: WorkerTime, known: PartsByRole | None, span: WindowSpan) -> WorkerOccupancy:
    facts, covered_ns = spent.facts, spent.time.covered_ns
    own = None if known is None else _sum(known)
    return WorkerOccupancy.of(
        spent,
        id=facts.worker_id,
        estimate=_estimate(fleet, span, [facts.worker_id]),
        node=facts.node,
        model=facts.assignment.model,
        group=facts.group,
        role=spent.role,
        by_role=[_role_time(fleet, facts, part) for part in spent.parts] if len(spent.parts) > 1 else [],
        running=facts.load.running,
        waiting=facts.load.waiting,
        waiting_prefill_tokens=facts.load.waiting_prefill_tokens,
        awaiting_kv=facts.load.awaiting_kv,
        places=facts.max_sequences,
        starved=own and share(own.starved_ns, covered_ns),
        dummy=own and share(own.dummy_ns, covered_ns),
        dummy_gpu_ns=own and own.dummy_ns,
        encode=own and share(own.encode_ns, covered_ns),
        encode_gpu_ns=own and own.encode_ns,
        dummy_steps=facts.dummy_steps,
        kv_used=kv_used(facts.load.free_kv_blocks, facts.kv_blocks),
        since_step_ms=since_step_ns(facts, fleet.last_step_end_ns(facts.worker_id)) // 1_000_000,
        utilisation=_utilisation(fleet, facts, spent.time, [(span.low_ns, span.high_ns)]),
    )


def _known_parts(fleet: FleetTelemetry, spent: WorkerTime) -> PartsByRole | None:
    """Return the parts of a worker's roles; None if another instance reads the worker."""
    if fleet.timeline(spent.facts.worker_id) is None:
        return None
    return [_parts_in(fleet, part, spent.facts) for part in spent.parts]


def _parts_in(fleet: FleetTelemetry, part: RoleGpuTime, facts: WorkerFacts) -> KnownParts:
    starved_ns = sum(fleet.starved_ns(facts.worker_id, *run) for run in part.runs_ns) * facts.gpus
    dummy_ns = sum(fleet.dummy_ns(facts.worker_id, *run) for run in part.runs_ns) * facts.gpus
    encode_ns = sum(fleet.encode_ns(facts.worker_id, *run) for run in part.runs_ns) * facts.gpus
    time = part.time
    return KnownParts(min(starved_ns, time.idle_ns), min(dummy_ns, time.idle_ns), min(encode_ns, time.prefill_ns))


def _parts_by_role(spent: Sequence[WorkerTime], known: Sequence[PartsByRole | None]) -> defaultdict[str, KnownParts]:
    """Sum the parts by role, without workers that other instances read."""
    found: defaultdict[str, KnownParts] = defaultdict(KnownParts)
    for each, parts in zip(spent, known, strict=True):
        for part, idle in zip(each.parts, parts or (), strict=parts is not None):
            found[part.role] = found[part.role].plus(idle)
    return found


def _sum(parts: Iterable[KnownParts]) -> KnownParts:
    return reduce(KnownParts.plus, parts, KnownParts())


def _role_time(fleet: FleetTelemetry, facts: WorkerFacts, part: RoleGpuTime) -> RoleTime:
    used = _utilisation(fleet, facts, part.time, part.runs_ns)
    return RoleTime(role=part.role, gpu_ns=GpuTime.of(part.time), utilisation=used)


def _utilisation(
    fleet: FleetTelemetry, facts: WorkerFacts, time: PhaseTime, runs_ns: list[tuple[int, int]]
) -> PhaseUtilisation | None:
    """Compute the utilisation over the part of the runs whose steps are still held; `time` covers all runs.

    None if no steps are held, or if the worker does not report its model's shape and device.
    """
    compute, worker_id = facts.compute, facts.worker_id
    from_ns = fleet.efforts_from_ns(worker_id)
    if compute is None or from_ns is None or from_ns >= runs_ns[-1][1]:
        return None
    known_ns = [(max(low_ns, from_ns), high_ns) for low_ns, high_ns in runs_ns if high_ns > from_ns]
    if known_ns != runs_ns:
        times = [fleet.phases(worker_id, *run).times(facts.gpus) for run in known_ns]
        prefill_ns, decode_ns = sum(each.prefill_ns for each in times), sum(each.decode_ns for each in times)
    else:
        prefill_ns, decode_ns = time.prefill_ns, time.decode_ns
    efforts = [fleet.effort(worker_id, *run) for run in known_ns]

    def of(flops: float, moved_bytes: float, gpu_ns: int) -> Utilisation:
        return Utilisation(
            mfu=utilisation(flops, compute.peak_flops_per_s, gpu_ns),
            mbu=utilisation(moved_bytes, compute.peak_bytes_per_s, gpu_ns),
        )

    return PhaseUtilisation(
        prefill=of(sum(e.prefill_flops for e in efforts), sum(e.prefill_bytes for e in efforts), prefill_ns),
        decode=of(sum(e.decode_flops for e in efforts), sum(e.decode_bytes for e in efforts), decode_ns),
    )


def _pools(spent: Sequence[WorkerTime]) -> list[tuple[str, Total]]:
    """Sum the time by the role that workers had then, in order of role."""
    pools: dict[str, list[RoleGpuTime]] = {}
    for each in spent:
        for part in each.parts:
            pools.setdefault(part.role, []).append(part)
    return [(role, total(parts)) for role, parts in sorted(pools.items())]


def _parts(spent: Sequence[WorkerTime], name: Callable[[WorkerFacts], str]) -> list[tuple[str, Total]]:
    """Sum the time of workers that share a name, in order of name."""
    parts: dict[str, list[WorkerTime]] = {}
    for each in spent:
        parts.setdefault(name(each.facts), []).append(each)
    return [(name, total(part)) for name, part in sorted(parts.items())]


WINDOW_NS: Final = 2_000_000_000
HELD_NS: Final = 1_000_000_000
"""The time for which one computed cluster is reused. Every open page requests its figures every two seconds."""
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
    """The share of a second in which tensor cores worked, as a mean of the GPUs on the scope's nodes."""
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
    parts = [each for worker in workers for each in _in_scope(worker, scope)]
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


def _in_scope(worker: WorkerOccupancy, scope: Scope) -> list[WorkerOccupancy | RoleTime]:
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
