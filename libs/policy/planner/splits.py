"""The splits of a model's workers into roles that limits allow, with how each presses. Pure."""

from collections.abc import Callable
from typing import Final

from libs.policy.planner.limits import ModelLimits
from libs.policy.pressure.splits import Split, WorkerProfile, Workload, split

EVERY: Final = ModelLimits()
MOST_WEIGHED: Final = 64
"""Splits of a model's workers that are weighed at once: of more of them some at equal distances, then those around the
best."""
FINER: Final = 8
"""Times, from one round of such to the next."""

Press = Callable[[int, int], Split]
"""How (prefill, mixed) workers press."""


def weigh(
    press: Press, workers: int, limits: ModelLimits = EVERY, *, least_prefill: int = 1, least_mixed: int = 1
) -> list[Split]:
    """Those that limits allow, with at least these numbers of workers by role: all up to `MOST_WEIGHED`, else the
    best and others at distances that grow from it. Cost falls and then rises along them, so that the best is found."""
    first = max(least_prefill, limits.prefill_min, workers - limits.decode_max, 0)
    last = min(workers - max(least_mixed, limits.decode_min), limits.prefill_max)
    count = last - first + 1
    found: dict[int, Split] = {}
    low, high, step = first, last, max(-(-count // MOST_WEIGHED), 1)
    while True:
        for prefill in (*range(low, high, step), high) if low <= high else ():
            if prefill not in found:
                found[prefill] = press(prefill, workers - prefill)
        if step == 1 or not found:
            return list(found.values())
        best = min(found.values(), key=lambda each: each.cost).prefill
        low, high, step = max(best - step, first), min(best + step, last), max(step // FINER, 1)


def splits(
    engine: WorkerProfile,
    work: Workload,
    workers: int,
    limits: ModelLimits = EVERY,
    *,
    least_prefill: int = 1,
    least_mixed: int = 1,
) -> list[Split]:
    """Of work that is the same in all of them."""

    def press(prefill: int, mixed: int) -> Split:
        return split(engine, work, prefill, mixed)

    return weigh(press, workers, limits, least_prefill=least_prefill, least_mixed=least_mixed)


def best_split(engine: WorkerProfile, work: Workload, workers: int, limits: ModelLimits = EVERY) -> Split | None:
    """Of `workers` workers, at least one of each role where there are two; None where limits allow none."""
    weighed = splits(engine, work, workers, limits, least_prefill=min(workers - 1, 1))
    return min(weighed, key=lambda each: each.cost, default=None)
