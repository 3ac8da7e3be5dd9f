"""GPU time by phase over a window: of each worker, each model and the cluster. Pure."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from libs.perfmodel.utilisation import utilisation
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.members import Members
from libs.telemetry.windows.rollups import RollUps
from libs.telemetry.worker.facts import WorkerFacts
from libs.telemetry.worker.phase_time import PhaseTime
from services.metrics.accounting.phase_windows import Total, WindowSpan, WorkerTime, spent_in, total
from services.metrics.accounting.queues import PhaseQueue
from services.metrics.accounting.role_parts import RoleGpuTime

WORKERS_A_TURN: Final = 100
"""A few ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """GPU-nanoseconds: `prefill`, `decode`, `kv_wait` and `idle` add exactly to `covered`."""

    covered: int
    prefill: int
    decode: int
    kv_wait: int
    idle: int

    @classmethod
    def of(cls, time: PhaseTime) -> Self:
        """From a worker's or several workers' GPU-nanoseconds."""
        return cls(
            covered=time.covered_ns,
            prefill=time.prefill_ns,
            decode=time.decode_ns,
            kv_wait=time.kv_wait_ns,
            idle=time.idle_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Fractions of covered time, null when nothing is covered."""

    gpus: int
    coverage: float
    """Share of the time of `gpus` that telemetry covers, 0..1."""
    prefill: float | None
    decode: float | None
    kv_wait: float | None
    idle: float | None
    ratio: float | None
    """Prefill GPU time : decode GPU time; null when decode is 0."""
    provisional: bool
    """A step that still runs is counted as far as it is known to have run."""
    gpu_ns: GpuTime

    @classmethod
    def of(cls, spent: WorkerTime | Total, **own: Any) -> Self:
        """Of one worker or several; `own` are the fields that a subclass adds."""
        time = spent.time
        return cls(
            gpus=spent.gpus,
            coverage=time.covered_ns / spent.due_ns if spent.due_ns else 0.0,
            prefill=_share(time.prefill_ns, time.covered_ns),
            decode=_share(time.decode_ns, time.covered_ns),
            kv_wait=_share(time.kv_wait_ns, time.covered_ns),
            idle=_share(time.idle_ns, time.covered_ns),
            ratio=_share(time.prefill_ns, time.decode_ns),
            provisional=time.provisional,
            gpu_ns=GpuTime.of(time),
            **own,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """How near a phase comes to its device's peaks while it runs; null where that is not known."""

    mfu: float | None
    """FLOPs that the model needs, over what the device could compute in the phase's time."""
    mbu: float | None
    """Bytes of weights and KV that the model needs, over what its memory could move in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUtilisation:
    """By phase."""

    prefill: Utilisation
    decode: Utilisation

    def by_phase(self) -> dict[str, Utilisation]:
        """By the name of the phase."""
        return {"prefill": self.prefill, "decode": self.decode}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTime:
    """What a worker did while it had one role."""

    role: str
    gpu_ns: GpuTime
    utilisation: PhaseUtilisation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOccupancy(Occupancy):
    """One worker, with its depths at its last report."""

    id: str
    node: str
    model: str
    role: str
    """That it had last in the window."""
    by_role: list[RoleTime]
    """Where it had more than one in the window; empty for all others."""
    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    places: int
    """Sequences that it runs at a time; 0 where it does not report that."""
    starved: float | None
    """Share of its time, a part of `idle`: all KV that its sequences awaited was still to be computed elsewhere. Null
    where nothing is covered, and of a worker that another instance reads."""
    kv_used: float | None
    """Share of its KV blocks that sequences hold; null where it does not report how many it has."""
    since_step_ms: int
    """From the end of the last step that has ended until its telemetry did."""
    utilisation: PhaseUtilisation | None
    """Null for a worker that reports neither its model's shape nor its device's peaks."""

    @property
    def at_hand(self) -> int:
        """Sequences that it holds, running or not."""
        return self.running + self.waiting + self.awaiting_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOccupancy(Occupancy):
    """The workers assigned to one model now."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOccupancy(Occupancy):
    """The time of workers while they had one role: a worker that moved counts in both pools, for its time in each."""

    role: str
    starved: float | None
    """As of a worker; those that other instances read count as not starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOccupancy(Occupancy):
    """The workers of one host."""

    node: str
    clock_offset_ms: float
    """How far its clock seems ahead of the median host's, from when telemetry comes: good to some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareGpu:
    """A GPU's own counters at their latest reading; null where GPU or driver do not report it."""

    node: str
    uuid: str
    index: int
    name: str
    utilisation: float | None
    """Share of the driver's last sampling period in which any kernel ran."""
    memory_used_bytes: int | None
    memory_bytes: int | None
    power_w: float | None
    tensor_active: float | None
    """Share of the last second in which tensor cores worked; Hopper and later."""
    dram_active: float | None
    """Share of the memory's bandwidth used in the last second; Hopper and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOccupancy(Occupancy):
    """All workers weighed by their GPUs. One that is silent without having left counts in `gpus` and lowers `coverage`
    until it is given up; in the fractions of time it counts for nothing."""

    window_ms: int
    """What was asked for, rounded up to whole windows of those kept for that time."""
    starved: float | None
    """As of a pool."""
    as_of_unix_ns: int
    """The end of the window."""
    age_ms: int | None
    """How old the newest data are that the service shows: now, less the instant until which half of its workers have
    reported their time. Null without any worker, and of a time in the past."""
    workers: list[WorkerOccupancy]
    models: list[ModelOccupancy]
    pools: list[PoolOccupancy]
    nodes: list[NodeOccupancy]
    queues: list[PhaseQueue]
    """What waits now, by model and phase, at workers and at gateways; empty of a time in the past."""
    hardware: list[HardwareGpu]
    """GPUs whose counters were read within seconds of the end; empty where none can be, and of a time long past."""


def cluster_occupancy(
    fleet: FleetTelemetry, rollups: RollUps, members: Members, end_ns: int, window_ns: int
) -> ClusterOccupancy:
    """How the last whole windows that end by `end_ns` were spent. A worker's time counts for the model it is assigned
    to now."""
    span = spent_in(fleet, rollups, members, end_ns, window_ns)
    return _cluster(fleet, span, [_worker(fleet, each, span) for each in span.workers], end_ns)


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
    """The same, with a turn for others every `WORKERS_A_TURN`."""
    span, workers = spent_in(fleet, rollups, members, end_ns, window_ns), []
    for first in range(0, len(span.workers), WORKERS_A_TURN):
        workers += [_worker(fleet, each, span) for each in span.workers[first : first + WORKERS_A_TURN]]
        await asyncio.sleep(0)
    return _cluster(fleet, span, workers, end_ns, queues, age_ms=age_ms)


def _cluster(
    fleet: FleetTelemetry,
    span: WindowSpan,
    workers: list[WorkerOccupancy],
    end_ns: int,
    queues: Sequence[PhaseQueue] = (),
    *,
    age_ms: int | None = None,
) -> ClusterOccupancy:
    offsets_ns = fleet.clocks.offsets_ns(span.high_ns)
    pools, starved_ns = _pools(span.workers), _starved_by_role(fleet, span.workers)
    whole = total(span.workers)
    return ClusterOccupancy.of(
        whole,
        starved=_share(sum(starved_ns.values()), whole.time.covered_ns),
        window_ms=(span.high_ns - span.low_ns) // 1_000_000,
        as_of_unix_ns=span.high_ns,
        age_ms=age_ms,
        workers=workers,
        models=[
            ModelOccupancy.of(part, model=model)
            for model, part in _parts(span.workers, lambda facts: facts.assignment.model)
        ],
        pools=[
            PoolOccupancy.of(part, role=role, starved=_share(starved_ns[role], part.time.covered_ns))
            for role, part in pools
        ],
        nodes=[
            NodeOccupancy.of(part, node=node, clock_offset_ms=offsets_ns.get(node, 0) / 1e6)
            for node, part in _parts(span.workers, lambda facts: facts.node)
        ],
        queues=list(queues),
        # By what was asked for: whole windows of a long span may end up to a minute before.
        hardware=[HardwareGpu(node=seen.node, **asdict(seen.reading)) for seen in fleet.hardware.fresh(end_ns)],
    )


def kv_used(free_kv_blocks: int, kv_blocks: int) -> float | None:
    """Share of a worker's KV blocks that sequences hold; None where it does not report how many it has."""
    return 1 - min(free_kv_blocks / kv_blocks, 1) if kv_blocks else None


def since_step_ns(facts: WorkerFacts, last_step_end_ns: int) -> int:
    """From the end of the last step that has ended until the worker's telemetry did."""
    return max(facts.covered_to_unix_ns - last_step_end_ns, 0)


def _worker(fleet: FleetTelemetry, spent: WorkerTime, span: WindowSpan) -> WorkerOccupancy:
    facts = spent.facts
    return WorkerOccupancy.of(
        spent,
        id=facts.worker_id,
        node=facts.node,
        model=facts.assignment.model,
        role=spent.role,
        by_role=[_role_time(fleet, facts, part) for part in spent.parts] if len(spent.parts) > 1 else [],
        running=facts.load.running,
        waiting=facts.load.waiting,
        waiting_prefill_tokens=facts.load.waiting_prefill_tokens,
        awaiting_kv=facts.load.awaiting_kv,
        places=facts.max_sequences,
        starved=_share(sum(_starved_ns(fleet, each, facts) for each in spent.parts), spent.time.covered_ns)
        if fleet.timeline(facts.worker_id) is not None
        else None,
        kv_used=kv_used(facts.load.free_kv_blocks, facts.kv_blocks),
        since_step_ms=since_step_ns(facts, fleet.last_step_end_ns(facts.worker_id)) // 1_000_000,
        utilisation=_utilisation(fleet, facts, spent.time, [(span.low_ns, span.high_ns)]),
    )


def _starved_ns(fleet: FleetTelemetry, part: RoleGpuTime, facts: WorkerFacts) -> int:
    """GPU-nanoseconds, never more than it was idle."""
    starved_ns = sum(fleet.starved_ns(facts.worker_id, *run) for run in part.runs_ns) * facts.gpus
    return min(starved_ns, part.time.idle_ns)


def _starved_by_role(fleet: FleetTelemetry, spent: Sequence[WorkerTime]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in spent:
        for part in each.parts:
            found[part.role] += _starved_ns(fleet, part, each.facts)
    return found


def _role_time(fleet: FleetTelemetry, facts: WorkerFacts, part: RoleGpuTime) -> RoleTime:
    used = _utilisation(fleet, facts, part.time, part.runs_ns)
    return RoleTime(role=part.role, gpu_ns=GpuTime.of(part.time), utilisation=used)


def _utilisation(
    fleet: FleetTelemetry, facts: WorkerFacts, time: PhaseTime, runs_ns: list[tuple[int, int]]
) -> PhaseUtilisation | None:
    """Of the part of the runs that is remembered step by step, `time` being all of them; None where nothing of it is,
    or the worker does not report its model's shape and device."""
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
    """By the role that workers had then, in order."""
    pools: dict[str, list[RoleGpuTime]] = {}
    for each in spent:
        for part in each.parts:
            pools.setdefault(part.role, []).append(part)
    return [(role, total(parts)) for role, parts in sorted(pools.items())]


def _parts(spent: Sequence[WorkerTime], name: Callable[[WorkerFacts], str]) -> list[tuple[str, Total]]:
    """By name, in order."""
    parts: dict[str, list[WorkerTime]] = {}
    for each in spent:
        parts.setdefault(name(each.facts), []).append(each)
    return [(name, total(part)) for name, part in sorted(parts.items())]


def _share(part_ns: int, whole_ns: int) -> float | None:
    return part_ns / whole_ns if whole_ns else None
