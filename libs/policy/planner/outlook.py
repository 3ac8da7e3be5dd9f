"""Predict what a split of a model's workers means for requests while demand stays as it is.

The prediction is first-order: the queue is computed at the speed of the split, and a new prompt after it. Decodes
are spread evenly over their workers. It ranks splits and shows operators what to expect; the measured figures are
reported beside it afterwards.
"""

from dataclasses import dataclass
from typing import Final

from libs.policy.pressure.splits import Split, WorkerProfile, Workload, decode_step_ns, prompt_speed, ride
from libs.policy.worker.pace import IN_HAND

MAX_NS: Final = 3_600_000_000_000
"""The bound on a predicted time, also used for a phase without workers."""


@dataclass(frozen=True, slots=True)
class RequestOutlook:
    """The prediction for requests that arrive now."""

    ttft_ns: float
    """The time from the arrival of a prompt of one chunk to its first token."""
    tpot_ns: float
    served: float
    """The share of the work done in time, 0..1."""


def outlook(engine: WorkerProfile, work: Workload, split: Split) -> RequestOutlook:
    """Predict for a split from `splits`, whose decode workers take prompts as far as TPOT allows."""
    speed = prompt_speed(engine, work, split.prefill, split.mixed)
    chunk_ns = engine.chunk_tokens / engine.chunk_speed
    ttft_ns = work.waiting_ns / speed + chunk_ns if speed else MAX_NS
    return RequestOutlook(min(ttft_ns, MAX_NS), min(_tpot_ns(engine, work, split), MAX_NS), served_of(split))


def served_of(split: Split) -> float:
    """Return the share of the work that a split does in time, 0..1."""
    return min(1.0, 1.0 / split.pressure) if split.pressure else 1.0


def _tpot_ns(engine: WorkerProfile, work: Workload, split: Split) -> float:
    """Return the time of a decode step alone, lengthened towards the target as far as prompts press."""
    if not work.decodes or not split.mixed:
        return 0.0
    alone_ns = decode_step_ns(engine, float(work.decodes), float(work.kv_tokens), float(split.mixed))
    filled_ns = work.tpot_ns * (1 - IN_HAND)
    if not ride(engine, work, split.mixed) or filled_ns <= alone_ns:
        return alone_ns
    return alone_ns + (filled_ns - alone_ns) * min(split.prompt_pressure, 1.0)
