"""The splits of a model's workers into roles that limits allow, with the pressure of each."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from libs.policy.planner.limits import ModelLimits
from libs.policy.pressure.numbers import Numbers
from libs.policy.pressure.splits import Split, Splits, WorkerProfile, Workload, pressed

EVERY: Final = ModelLimits()

Press = Callable[[Numbers, Numbers], tuple[Numbers, Numbers]]
"""A function from (prefill, mixed) workers to (prompt, decode) pressures, arrays of shape [splits]."""


class Weighed:
    """The rated splits of one number of workers, from the fewest prefill workers to the most."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._costs = splits.costs()
        self._order = np.argsort(self._costs, kind="stable")

    def __len__(self) -> int:
        return len(self._costs)

    @property
    def best(self) -> Split | None:
        """The split of the least pressure; None if there are no splits."""
        return self._splits.at(int(self._order[0])) if len(self) else None

    def first(self, count: int) -> Sequence[Split]:
        """Return the `count` splits with the least pressure, in that order."""
        return [self._splits.at(place) for place in self._order[:count].tolist()]

    def of(self, prefill: int) -> Split | None:
        """Return the split with this number of prefill workers, or None."""
        place = prefill - int(self._splits.prefill[0]) if len(self) else -1
        return self._splits.at(place) if 0 <= place < len(self) else None

    def nearest(self, mixed: int, most_cost: float) -> Split | None:
        """Return the split no costlier than `most_cost` with the number of mixed workers nearest to `mixed`.

        Of two equally near ones it is the better.
        """
        good = self._order[self._costs[self._order] <= most_cost]
        return self._splits.at(int(good[np.abs(self._splits.mixed[good] - mixed).argmin()])) if len(good) else None

    def least_pressure(self) -> float:
        """Return the lowest pressure of the worse phase over all splits; infinite if there are none."""
        worse = np.maximum(self._splits.prompt_pressure, self._splits.decode_pressure)
        return float(worse.min(initial=np.inf))


def weigh(
    press: Press, workers: int, limits: ModelLimits = EVERY, *, least_prefill: int = 1, least_mixed: int = 1
) -> Weighed:
    """Rate all splits that the limits allow, with at least these numbers of workers by role."""
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
    """Rate all splits for work that is the same in each of them."""

    def press(prefill: Numbers, mixed: Numbers) -> tuple[Numbers, Numbers]:
        same = 0.0 * mixed
        decodes, kv_tokens = work.decodes + same, work.kv_tokens + same
        return pressed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed)

    return weigh(press, workers, limits, least_prefill=least_prefill, least_mixed=least_mixed)


def best_split(engine: WorkerProfile, work: Workload, workers: int, limits: ModelLimits = EVERY) -> Split | None:
    """Return the best split of `workers` workers, or None if the limits allow none.

    It has at least one worker of each role if there are two workers.
    """
    return splits(engine, work, workers, limits, least_prefill=min(workers - 1, 1)).best
