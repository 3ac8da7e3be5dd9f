"""What `/v1/occupancy` answers: GPU time by phase of workers, groups of them, models, pools, nodes and the cluster."""

from dataclasses import dataclass
from typing import Any, Self

from libs.telemetry.worker.phase_time import PhaseTime
from services.metrics.accounting.phase_windows import Total, WorkerTime
from services.metrics.accounting.queues import PhaseQueue


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
    due_gpu_ns: int
    """GPU-nanoseconds of which telemetry should cover all: `coverage` is its part of them."""

    @classmethod
    def of(cls, spent: WorkerTime | Total, **own: Any) -> Self:
        """Of one worker or several; `own` are the fields that a subclass adds."""
        time = spent.time
        return cls(
            gpus=spent.gpus,
            coverage=time.covered_ns / spent.due_ns if spent.due_ns else 0.0,
            prefill=share(time.prefill_ns, time.covered_ns),
            decode=share(time.decode_ns, time.covered_ns),
            kv_wait=share(time.kv_wait_ns, time.covered_ns),
            idle=share(time.idle_ns, time.covered_ns),
            ratio=share(time.prefill_ns, time.decode_ns),
            provisional=time.provisional,
            gpu_ns=GpuTime.of(time),
            due_gpu_ns=spent.due_ns,
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
    group: str
    """Data-parallel group of which it is a rank; empty: of none."""
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
    dummy: float | None
    """Share of its time, a part of `idle`: dummy steps, which vLLM runs where another rank of the data-parallel group
    has work. Null where `starved` is."""
    dummy_gpu_ns: int | None
    """The same in GPU-nanoseconds. Time may be both starved and of a dummy step."""
    dummy_steps: int
    """That have ended since the worker began."""
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
class GroupOccupancy(Occupancy):
    """A data-parallel group of vLLM's: whole nanoseconds and counts are the sums of its ranks'."""

    group: str
    model: str
    scope: str
    """By which history, efficiency and page know it."""
    role: str
    """Of its first rank; all have one, but while they change it."""
    ranks: list[str]
    """Ids of the workers that it consists of, in order."""
    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    places: int
    starved: float | None
    """As of a worker; null where another instance reads any of the ranks."""
    dummy: float | None
    dummy_gpu_ns: int | None
    dummy_steps: int
    """That have ended since its ranks began."""
    kv_used: float | None


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
    dummy: float | None
    dummy_gpu_ns: int
    """Likewise."""


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
    dummy: float | None
    dummy_gpu_ns: int
    """As of a pool."""
    as_of_unix_ns: int
    """The end of the window."""
    age_ms: int | None
    """How old the newest data are that the service shows: now, less the instant until which half of its workers have
    reported their time. Null without any worker, and of a time in the past."""
    workers: list[WorkerOccupancy]
    groups: list[GroupOccupancy]
    """Data-parallel groups, of which each rank is one of `workers` too."""
    models: list[ModelOccupancy]
    pools: list[PoolOccupancy]
    nodes: list[NodeOccupancy]
    queues: list[PhaseQueue]
    """What waits now, by model and phase, at workers and at gateways; empty of a time in the past."""
    hardware: list[HardwareGpu]
    """GPUs whose counters were read within seconds of the end; empty where none can be, and of a time long past."""


def kv_used(free_kv_blocks: int, kv_blocks: int) -> float | None:
    """Share of a worker's KV blocks that sequences hold; None where it does not report how many it has."""
    return 1 - min(free_kv_blocks / kv_blocks, 1) if kv_blocks else None


def share(part_ns: int, whole_ns: int) -> float | None:
    """A fraction; None of nothing."""
    return part_ns / whole_ns if whole_ns else None
