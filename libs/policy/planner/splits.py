"""The splits of a model's workers into roles that limits allow, with how each presses. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from libs.policy.planner.limits import ModelLimits
from libs.policy.pressure.numbers import Numbers
from libs.policy.pressure.splits import Split, Splits, WorkerProfile, Workload, pressed

EVERY: Final = ModelLimits()

Press = Callable[[Numbers, Numbers], tuple[Numbers, Numbers]]
"""(prompt, decode) pressures of (prefill, mixed) workers, [splits] each."""


class Weighed:
    """Splits of one number of workers, side by side, from the fewest prefill workers to the most."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._costs = splits.costs()
        self._order = np.argsort(self._costs, kind="stable")

    def __len__(self) -> int:
        return len(self._costs)

    @property
    def best(self) -> Split | None:
        """Which presses least; None where there is none."""
        return self._splits.at(int(self._order[0])) if len(self) else None

    def first(self, count: int) -> Sequence[Split]:
        """The `count` splits that press least, in that order."""
        return [self._splits.at(place) for place in self._order[:count].tolist()]

    def of(self, prefill: int) -> Split | None:
        """That with this number of prefill workers."""
        place = prefill - int(self._splits.prefill[0]) if len(self) else -1
        return self._splits.at(place) if 0 <= place < len(self) else None

    def nearest(self, mixed: int, most_cost: float) -> Split | None:
        """Of those that cost no more, the one whose mixed workers are nearest in number; of two the better."""
        good = self._order[self._costs[self._order] <= most_cost]
        return self._splits.at(int(good[np.abs(self._splits.mixed[good] - mixed).argmin()])) if len(good) else None

    def least_pressure(self) -> float:
        """Of the phase that is worse off, in the best of them by that; infinite where there is none."""
        worse = np.maximum(self._splits.prompt_pressure, self._splits.decode_pressure)
        return float(worse.min(initial=np.inf))


def weigh(
    press: Press, workers: int, limits: ModelLimits = EVERY, *, least_prefill: int = 1, least_mixed: int = 1
) -> Weighed:
    """All that limits allow, with at least these numbers of workers by role."""
    first = max(least_prefill, limits.prefill_min, workers - limits.decode_max, 0)
    last = min(workers - max(least_mixed, limits.decode_min), limits.prefill_max)
    prefill = np.arange(first, max(last + 1, first), dtype=np.float64)
    mixed = workers - prefill
    return Weighed(Splits(prefill, mixed, *press(prefill, mixed)))


def splits(
    engine: WorkerProfile,
    work: Workload,
    workers: int,
    limits: ModelLimits = EVERY,
    *,
    least_prefill: int = 1,
    least_mixed: int = 1,
) -> Weighed:
    """Of work that is the same in all of them."""

    def press(prefill: Numbers, mixed: Numbers) -> tuple[Numbers, Numbers]:
        same = 0.0 * mixed
        decodes, kv_tokens = work.decodes + same, work.kv_tokens + same
        return pressed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed)

    return weigh(press, workers, limits, least_prefill=least_prefill, least_mixed=least_mixed)


def best_split(engine: WorkerProfile, work: Workload, workers: int, limits: ModelLimits = EVERY) -> Split | None:
    """Of `workers` workers, at least one of each role where there are two; None where limits allow none."""
    return splits(engine, work, workers, limits, least_prefill=min(workers - 1, 1)).best
