"""What a split of a model's workers would mean to requests, while demand stays as it is. Pure.

First-order: what waits is computed at the speed of the split, and a new prompt after it; decodes share their workers
evenly. It ranks splits and tells people what to expect; the measured figures stand beside it afterwards.
"""

from dataclasses import dataclass
from typing import Final

from libs.policy.pressure.splits import Split, WorkerProfile, Workload, decode_step_ns, prompt_speed, ride
from libs.policy.worker.slack import IN_HAND

MAX_NS: Final = 3_600_000_000_000
"""What is predicted at most: nobody serves the phase, or not within an hour."""


@dataclass(frozen=True, slots=True)
class RequestOutlook:
    """Predicted for requests that come now."""

    ttft_ns: float
    """From the arrival of a prompt of one chunk to its first token."""
    tpot_ns: float
    served: float
    """Share of the work that would be done in time, 0..1."""


def outlook(engine: WorkerProfile, work: Workload, split: Split) -> RequestOutlook:
    """Of a split that `splits` has weighed, decode workers taking prompts as far as TPOT allows."""
    speed = prompt_speed(engine, work, split.prefill, split.mixed)
    chunk_ns = engine.chunk_tokens / engine.chunk_speed
    ttft_ns = work.waiting_ns / speed + chunk_ns if speed else MAX_NS
    return RequestOutlook(min(ttft_ns, MAX_NS), min(_tpot_ns(engine, work, split), MAX_NS), served_of(split))


def served_of(split: Split) -> float:
    """Share of the work that a split does in time."""
    return min(1.0, 1.0 / split.pressure) if split.pressure else 1.0


def _tpot_ns(engine: WorkerProfile, work: Workload, split: Split) -> float:
    """Decodes alone, or as far towards the target as prompts that press fill the steps up."""
    if not work.decodes or not split.mixed:
        return 0.0
    alone_ns = decode_step_ns(engine, float(work.decodes), float(work.kv_tokens), float(split.mixed))
    filled_ns = work.tpot_ns * (1 - IN_HAND)
    if not ride(engine, work, split.mixed) or filled_ns <= alone_ns:
        return alone_ns
    return alone_ns + (filled_ns - alone_ns) * min(split.prompt_pressure, 1.0)
