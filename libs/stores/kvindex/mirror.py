"""A worker's copy of its entries in the index, from which an emptied store is filled again. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LISTED_BLOCKS = 1_000_000
"""Blocks of one worker beyond this are not listed (about 100 MB of hashes here, as much in the store)."""


@dataclass(slots=True)
class Mirror:
    """One worker's listed blocks."""

    lease_ms: int
    blocks: set[bytes] = field(default_factory=set)
    in_doubt: bool = False
    """The store may differ: a change to it was not confirmed, so all of it is written anew."""

    def apply(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> list[bytes]:
        """Take a change, stored before removed, and give the stored that are to be listed."""
        room = MAX_LISTED_BLOCKS - len(self.blocks)
        listed = list(stored[: max(0, room)])
        self.blocks.update(listed)
        self.blocks.difference_update(removed)
        return listed
