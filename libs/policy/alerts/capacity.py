"""Alert conditions of pools that are forecast to be too small, with their certainty."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from libs.policy.alerts.rules import Condition, Name
from libs.policy.grade import Grade

CLEAR_SHARE = 0.5
"""The share of short sample paths below which the alert clears."""


@dataclass(frozen=True, slots=True)
class PoolAhead:
    """The capacity plan of one model's pool."""

    model: str
    phase: str
    short_gpus: int
    """GPUs missing in the first stretch in which four of five paths are short; 0 if there is none."""
    at_unix_s: float
    sure: float
    """The share of paths that are short in that stretch."""
    most_short: float
    """The largest share of short paths in any stretch."""
    start_s: float
    """The time that a worker takes to start; 0 if unknown."""


def capacity_conditions(pools: Sequence[PoolAhead], when: Sequence[str]) -> Iterator[Condition]:
    """Judge every pool; `when` holds each one's moment in words."""
    for pool, words in zip(pools, when, strict=True):
        labels = (("model", pool.model), ("phase", pool.phase))
        if pool.short_gpus > 0:
            gpus = f"{pool.short_gpus} GPU{'s' if pool.short_gpus > 1 else ''}"
            start = f"; workers need {_span(pool.start_s)} to start" if pool.start_s else ""
            reason = f"{pool.phase} short by {gpus} at {words}, {pool.sure:.0%} sure{start}"
            yield Condition(Name.CAPACITY_SHORT, labels, Grade.FIRE, reason)
            continue
        grade = Grade.CLEAR if pool.most_short < CLEAR_SHARE else Grade.HOLD
        reason = f"{pool.phase} is enough: at most {pool.most_short:.0%} of what may come is more"
        yield Condition(Name.CAPACITY_SHORT, labels, grade, reason)


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
