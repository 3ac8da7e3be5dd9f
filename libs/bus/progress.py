"""Whether a reader still moves, partition by partition. Pure."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)


class Progress(Generic[PartitionT]):
    """Remembers since when each partition has had records that are not read."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_at_s: dict[PartitionT, float] = {}
        self._positions: Mapping[PartitionT, int] = {}

    def stalled(
        self, now_s: float, positions: Mapping[PartitionT, int], ends: Mapping[PartitionT, int]
    ) -> list[PartitionT]:
        """Partitions that have been behind their end, at one position, for longer than the bound."""
        for partition, position in positions.items():
            if position >= ends[partition] or position != self._positions.get(partition):
                self._moved_at_s[partition] = now_s
        self._positions = positions
        return [partition for partition in positions if now_s - self._moved_at_s[partition] > self._stall_s]
