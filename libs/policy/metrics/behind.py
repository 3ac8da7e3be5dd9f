"""Which partitions a reader has fallen behind on. Pure.

Lag is measured by this process's own clock: where a partition ended some seconds ago, by what the broker said then. So
publishers' clocks do not count, nor does a pause after which the reader catches up by itself.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)

MAX_SAMPLES: Final = 64
"""Of one partition: it is looked at about once a second, and samples older than the bound are dropped."""


class Behind(Generic[PartitionT]):
    """Remembers where partitions ended, as far back as the bound."""

    def __init__(self, after_s: float) -> None:
        """A reader is behind where it has not come in `after_s` to where the partition ended before them."""
        self._after_s = after_s
        self._ends: dict[PartitionT, deque[tuple[float, int]]] = {}
        """(when, end), the oldest first: one that is as old as the bound, and all younger ones."""

    def note(
        self, now_s: float, positions: Mapping[PartitionT, int], ends: Mapping[PartitionT, int]
    ) -> list[PartitionT]:
        """Partitions that are behind at this moment; others than those of `positions` are forgotten."""
        self._ends = {each: self._ends.get(each) or deque(maxlen=MAX_SAMPLES) for each in positions}
        behind = []
        for partition, position in positions.items():
            samples = self._ends[partition]
            samples.append((now_s, ends[partition]))
            while len(samples) > 1 and samples[1][0] <= now_s - self._after_s:
                samples.popleft()
            at_s, end = samples[0]
            if at_s <= now_s - self._after_s and position < end:
                behind.append(partition)
        return behind

    def forget(self, partition: PartitionT) -> None:
        """The reader stands elsewhere now."""
        self._ends.pop(partition, None)
