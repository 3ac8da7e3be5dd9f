"""The answer of `/v1/occupancy`: GPU time by phase of workers, groups, models, pools, nodes and the cluster."""

from dataclasses import dataclass
from typing import Any, Self

from libs.telemetry.steps import PhaseTime
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
        """Convert the GPU-nanoseconds of one or more workers."""
        return cls(
            covered=time.covered_ns,
            prefill=time.prefill_ns,
            decode=time.decode_ns,
            kv_wait=time.kv_wait_ns,
            idle=time.idle_ns,
        )


@dataclass(frozen=True, slots=True)
class EstimatedPrefill:
    """Prefill's share of busy time and its bounds, estimated from servers' own counters.

    Null where nothing ran, and for windows that reach further back than bounds are kept.
    """

    prefill: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Fractions of covered time, null when nothing is covered."""

    gpus: int
    coverage: float
    """The share of the time of `gpus` that telemetry covers, 0..1."""
    prefill: float | None
    decode: float | None
    kv_wait: float | None
    idle: float | None
    ratio: float | None
    """Prefill GPU time : decode GPU time; null when decode is 0."""
    provisional: bool
    """True if a step that still runs is counted, as far as it is known to have run."""
    gpu_ns: GpuTime
    due_gpu_ns: int
    """GPU-nanoseconds that telemetry should cover; `coverage` is the covered share."""
    estimate: EstimatedPrefill | None = None
    """Null where times are measured, and for sums by node and group."""

    @classmethod
    def of(cls, spent: WorkerTime | Total, **own: Any) -> Self:
        """Build the figures of one or more workers; `own` are the fields that a subclass adds."""
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
    """A phase's use of the device relative to its peaks; null where that is unknown."""

    mfu: float | None
    """FLOPs that the model needs, divided by the device's capacity over the phase's time."""
    mbu: float | None
    """The bytes of weights and KV that the model needs, divided by the capacity of the device's memory over that time.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUtilisation:
    prefill: Utilisation
    decode: Utilisation

    def by_phase(self) -> dict[str, Utilisation]:
        return {"prefill": self.prefill, "decode": self.decode}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTime:
    """A worker's GPU time while it had one role."""

    role: str
    gpu_ns: GpuTime
    utilisation: PhaseUtilisation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOccupancy(Occupancy):
    """The figures of one worker, with its queue depths at its last report."""

    id: str
    node: str
    model: str
    group: str
    """Data-parallel group of which the worker is a rank; empty if there is none."""
    role: str
    """The last role that the worker had in the window."""
    by_role: list[RoleTime]
    """The time by role of a worker that had several in the window; empty for all others."""
    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    places: int
    """Sequences that the worker runs at a time; 0 if the worker does not report it."""
    starved: float | None
    """The share of the worker's time, a part of `idle`, in which all awaited KV was still being computed elsewhere.

    Null where nothing is covered, and for a worker that another instance reads.
    """
    dummy: float | None
    """The share of the worker's time, a part of `idle`, in dummy steps; null where `starved` is null.

    vLLM runs dummy steps while another rank of the data-parallel group has work.
    """
    dummy_gpu_ns: int | None
    """GPU-nanoseconds of `dummy`. Time may count both as starved and as a dummy step."""
    dummy_steps: int
    """The number of dummy steps that have ended since the worker's start."""
    encode: float | None
    """The share of the worker's time, a part of `prefill`, in steps that encoded images; null as `starved` is."""
    encode_gpu_ns: int | None
    """GPU-nanoseconds of `encode`."""
    kv_used: float | None
    """The share of the worker's KV blocks held by sequences; null if it does not report how many it has."""
    since_step_ms: int
    """The time from the end of the last finished step to the end of the worker's telemetry."""
    utilisation: PhaseUtilisation | None
    """Null for a worker that reports neither its model's shape nor its device's peaks."""

    @property
    def at_hand(self) -> int:
        """Sequences that the worker holds, running or not."""
        return self.running + self.waiting + self.awaiting_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOccupancy(Occupancy):
    """A data-parallel group of vLLM. Its nanoseconds and counts are the sums over its ranks."""

    group: str
    model: str
    scope: str
    """The name of the group as a scope in history, efficiency and the page."""
    role: str
    """The role of the first rank. All ranks have the same one, except while it changes."""
    ranks: list[str]
    """The ids of the workers that form the group, in order."""
    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    places: int
    starved: float | None
    """The same as for a worker; null if another instance reads any of the ranks."""
    dummy: float | None
    dummy_gpu_ns: int | None
    dummy_steps: int
    """Dummy steps that have ended since the ranks' starts."""
    encode: float | None
    """The same as for a worker; null as `starved` is."""
    encode_gpu_ns: int | None
    kv_used: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOccupancy(Occupancy):
    """The workers assigned to one model now."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOccupancy(Occupancy):
    """The time of workers while they had one role. A worker that moved counts in both pools, for its time in each."""

    role: str
    starved: float | None
    """The same as for a worker; workers that other instances read count as not starved."""
    dummy: float | None
    dummy_gpu_ns: int
    """GPU-nanoseconds of `dummy`, without workers that other instances read."""
    encode: float | None
    encode_gpu_ns: int
    """GPU-nanoseconds of `encode`, without workers that other instances read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOccupancy(Occupancy):
    node: str
    clock_offset_ms: float
    """Estimated lead of the node's clock over the median node's, from arrival times of telemetry; exact to some ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareGpu:
    """Hardware counters of a GPU at their latest reading; null where GPU or driver do not report them."""

    node: str
    uuid: str
    index: int
    name: str
    utilisation: float | None
    """The share of the driver's last sampling period in which any kernel ran."""
    memory_used_bytes: int | None
    memory_bytes: int | None
    power_w: float | None
    tensor_active: float | None
    """The share of the last second in which tensor cores worked; Hopper and later."""
    dram_active: float | None
    """The share of the memory's bandwidth used in the last second; Hopper and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOccupancy(Occupancy):
    """All workers weighed by their GPUs.

    A worker that is silent without having left counts in `gpus` and lowers `coverage` until it is given up. It does
    not count in the fractions of time.
    """

    window_ms: int
    """The length of the window, rounded up from the request to whole windows of the tier that is read."""
    starved: float | None
    dummy: float | None
    dummy_gpu_ns: int
    """GPU-nanoseconds of `dummy`, without workers that other instances read."""
    encode: float | None
    encode_gpu_ns: int
    """GPU-nanoseconds of `encode`, without workers that other instances read."""
    as_of_unix_ns: int
    """The end of the window in Unix ns."""
    age_ms: int | None
    """The age of the newest data that the service shows: now minus the time up to which half of its workers have
    reported.

    Null without any worker, and for a time in the past.
    """
    workers: list[WorkerOccupancy]
    groups: list[GroupOccupancy]
    """Data-parallel groups, whose ranks are listed in `workers` as well."""
    models: list[ModelOccupancy]
    pools: list[PoolOccupancy]
    nodes: list[NodeOccupancy]
    queues: list[PhaseQueue]
    """Present queues by model and phase, at workers and at gateways; empty for a time in the past."""
    hardware: list[HardwareGpu]
    """GPUs whose counters were read within seconds of the end; empty if there are none, and for a time long past."""


def kv_used(free_kv_blocks: int, kv_blocks: int) -> float | None:
    """Return the share of a worker's KV blocks held by sequences; None if it does not report how many it has."""
    return 1 - min(free_kv_blocks / kv_blocks, 1) if kv_blocks else None


def share(part_ns: int, whole_ns: int) -> float | None:
    """Return the fraction; None if the whole is 0."""
    return part_ns / whole_ns if whole_ns else None
