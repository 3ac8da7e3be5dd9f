"""The number of workers that a model's prompts need to meet their deadlines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Prompts are expected to arrive as they do for this long beyond the deadline of one that arrives now. A longer time
# would mistake bursts for a lasting rate; a shorter one would see a shortage only once prompts are late.
AHEAD_NS: Final = 10_000_000_000
# The nearest horizon: a prompt due within a moment does not need a thousand workers.
LEAST_NS: Final = 250_000_000


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompt work of a model, in nanoseconds of one prefill worker."""

    waiting: tuple[tuple[float, float], ...]
    """Pairs of (ns until the deadline, work) for waiting prompts that can be in time."""
    rate: float
    """Arriving work in ns a ns, which is the number of workers that it keeps busy."""
    limit_ns: float
    """The usual time from the arrival of a prompt to its deadline."""


def workers_needed(prompts: Prompts) -> tuple[float, float]:
    """Return (workers, horizon in ns) for the horizon that needs the most workers.

    The need at horizon h is the work due by h, waiting or expected, divided by h. Waiting work that is already late
    needs no workers of its own and uses what is left. Between two deadlines the need only falls or moves
    monotonically towards `rate`, so only deadlines and the farthest horizon are checked.
    """
    best, at_ns = 0.0, prompts.limit_ns
    for horizon_ns in _horizons(prompts):
        due = sum(work for left_ns, work in prompts.waiting if left_ns <= horizon_ns)
        need = (due + prompts.rate * max(horizon_ns - prompts.limit_ns, 0.0)) / horizon_ns
        if need > best:
            best, at_ns = need, horizon_ns
    return best, at_ns


def _horizons(prompts: Prompts) -> Iterable[float]:
    yield from (max(left_ns, LEAST_NS) for left_ns, _ in prompts.waiting)
    yield max(prompts.limit_ns, LEAST_NS) + AHEAD_NS
