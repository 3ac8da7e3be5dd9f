"""The engine steps behind a worker's figures, with the part of each that counts. Pure."""

from dataclasses import dataclass
from itertools import islice
from typing import Final

from libs.contracts.errors import NoLongerStored, StoredElsewhere, UnknownWorker
from libs.contracts.step_row import ReportedStep
from libs.telemetry.fleet import MAX_FLEET_STEPS, FleetTelemetry
from libs.telemetry.steps import FULL_SHARE, StepShare
from libs.telemetry.timeline import HISTORY_NS, MAX_STEPS, Timeline
from services.metrics.accounting.answer import GpuTime
from services.metrics.accounting.queues import MAX_COUNT

KEPT: Final = (
    f"Steps are kept for {HISTORY_NS // 10**9} s, at most the last {MAX_STEPS:,} of a worker and {MAX_FLEET_STEPS:,} "
    "of all, not over restarts of this service, and only by the instance that reads the worker."
)
MIXED: Final = "mixed"
ENCODE: Final = "encode"


@dataclass(frozen=True, slots=True)
class ReportedWait:
    """A time in which sequences awaited their KV; steps that ran in it count as steps."""

    start_unix_ns: int
    end_unix_ns: int


@dataclass(frozen=True, slots=True)
class StepsReport:
    """A worker's steps in a window.

    The sums of the steps' `prefill_ns` and `decode_ns`, times `gpus`, equal those of `gpu_ns` exactly.
    """

    worker: str
    node: str
    model: str
    gpus: int
    window_ms: int
    as_of_unix_ns: int
    """The end of the window in Unix ns."""
    kept_from_unix_ns: int
    """The time from which this worker's steps are known."""
    complete: bool
    """True if steps are known for the whole window."""
    gpu_ns: GpuTime
    steps: list[ReportedStep]
    """Steps that ran in the window, the oldest first."""
    left_out: int
    """The number of later steps, beyond the limit."""
    kv_waits: list[ReportedWait]
    """KV waits up to the limit, the oldest first."""


def steps_of(fleet: FleetTelemetry, worker_id: str, end_ns: int, window_ns: int, limit: int) -> StepsReport:
    """Return the steps that ran in the window.

    Raise UnknownWorker, StoredElsewhere if another instance reads the worker, or NoLongerStored if no steps of the
    window are held.
    """
    facts, timeline, low_ns = fleet.directory.facts(worker_id), fleet.timeline(worker_id), end_ns - window_ns
    if facts is None:
        raise UnknownWorker(f"worker={worker_id[:80]!r} is not known; /v1/occupancy lists the workers", param="worker")
    if timeline is None:
        raise StoredElsewhere(
            f"{worker_id} is read by the metrics service {fleet.directory.reader(worker_id)!r}, which has its steps",
            param="worker",
        )
    kept_from_ns = timeline.reported_from_ns
    if end_ns <= kept_from_ns:
        raise NoLongerStored(
            f"steps of {worker_id} are known from {kept_from_ns // 1_000_000} ms (Unix) on. {KEPT}", param="end_unix_ms"
        )
    spent = timeline.phases(low_ns, end_ns).times(facts.gpus)
    found = [_step(each) for each in islice(timeline.steps(low_ns, end_ns), limit)]
    return StepsReport(
        worker=worker_id,
        node=facts.node,
        model=facts.assignment.model,
        gpus=facts.gpus,
        window_ms=window_ns // 1_000_000,
        as_of_unix_ns=end_ns,
        kept_from_unix_ns=kept_from_ns,
        complete=kept_from_ns <= low_ns,
        gpu_ns=GpuTime(
            covered=spent.covered_ns,
            prefill=spent.prefill_ns,
            decode=spent.decode_ns,
            kv_wait=spent.kv_wait_ns,
            idle=spent.idle_ns,
        ),
        steps=found,
        left_out=timeline.begun(found[-1].start_unix_ns + 1, end_ns) if found else 0,
        kv_waits=_waits(timeline, low_ns, end_ns, limit),
    )


def _step(spent: StepShare) -> ReportedStep:
    step, counts = spent.step, spent.step.counts
    # A step that was cut off has no counts, and one that encodes contains images only.
    encodes = counts.prefill_sequences > 0 == counts.prefill_tokens and not counts.decode_sequences
    kinds = {FULL_SHARE: ENCODE if encodes else "prefill", 0: "decode"}
    return ReportedStep(
        start_unix_ns=step.start_ns,
        end_unix_ns=step.end_ns,
        running=step.running,
        kind=kinds.get(step.prefill_share, MIXED),
        prefill_share=step.prefill_share / FULL_SHARE,
        prefill_tokens=min(counts.prefill_tokens, MAX_COUNT),
        prefill_sequences=min(counts.prefill_sequences, MAX_COUNT),
        decode_sequences=min(counts.decode_sequences, MAX_COUNT),
        decode_kv_tokens=min(counts.decode_kv_tokens, MAX_COUNT),
        prefill_ns=spent.prefill_ns,
        decode_ns=spent.decode_ns,
    )


def _waits(timeline: Timeline, low_ns: int, high_ns: int, limit: int) -> list[ReportedWait]:
    return [ReportedWait(start_ns, end_ns) for start_ns, end_ns in timeline.kv_waits(low_ns, high_ns)[:limit]]
