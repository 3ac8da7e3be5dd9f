"""How many workers the prompts of a model need, so that each is computed by its deadline. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

AHEAD_NS: Final = 10_000_000_000
"""Beyond the deadline of a prompt that comes now: how far prompts are expected to come as they do. Farther, bursts
would be taken for what goes on; nearer, a shortage would be seen only once prompts are late."""
LEAST_NS: Final = 250_000_000
"""The nearest horizon: a prompt that is due within a moment does not need a thousand workers."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is to be computed. Work is in nanoseconds of one prefill worker."""

    waiting: tuple[tuple[float, float], ...]
    """(ns until the deadline, work) of prompts that wait and can be in time."""
    rate: float
    """Work that comes, in ns a ns: the number of workers that it would keep busy."""
    limit_ns: float
    """From the arrival of a prompt to its deadline, as is usual."""


def workers_needed(prompts: Prompts) -> tuple[float, float]:
    """(workers, horizon in ns): the most that any horizon needs, and that horizon.

    For a horizon h it is work due by h, waiting or expected, over h. What waits and is late already needs nobody: it is
    computed with what is left. Between two deadlines the need only falls, or goes one way towards `rate`, so that
    deadlines and the farthest horizon are all that is to be looked at.
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
