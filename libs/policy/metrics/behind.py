"""Detection of partitions on which a reader has fallen behind.

Lag is measured by this process's own clock, from the ends that the broker reported some seconds ago. Publishers'
clocks do not matter, and neither does a pause after which the reader catches up by itself.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)

# A partition is sampled about once a second, and samples older than the bound are dropped.
MAX_SAMPLES: Final = 64


class Behind(Generic[PartitionT]):
    """A bounded history of where partitions ended."""

    def __init__(self, after_s: float) -> None:
        """A reader is behind if it has not reached the partition's end of `after_s` ago."""
        self._after_s = after_s
        # (time, end) pairs, the oldest first: one that is as old as the bound, and all younger ones.
        self._ends: dict[PartitionT, deque[tuple[float, int]]] = {}

    def note(
        self, now_s: float, positions: Mapping[PartitionT, int], ends: Mapping[PartitionT, int]
    ) -> list[PartitionT]:
        """Return the partitions that are behind; partitions missing from `positions` are forgotten."""
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
        """Drop the history of a partition, as after the reader moved."""
        self._ends.pop(partition, None)
