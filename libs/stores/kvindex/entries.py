"""What a look-up in the index asks, what its answers mean, and a worker's copy of its own entries. Pure."""

from collections.abc import Mapping, Sequence
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


def distinct(hashes: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Every hash once: prompts that begin alike share their first blocks."""
    return list(dict.fromkeys(block for prompt in hashes for block in prompt))


def leading_blocks(prompt: Sequence[bytes], held: Mapping[bytes, bool]) -> int:
    """How many of the prompt's blocks are held from its start on without a gap."""
    for count, block in enumerate(prompt):
        if not held[block]:
            return count
    return len(prompt)


def probes(blocks: int, at_most: int) -> list[int]:
    """Depths 1..blocks at which to ask for a prefix: all of them, or `at_most` that lie evenly and end at the last.

    A chained hash stands for all blocks before it, and pools evict a chain from its end: who holds a block holds what
    leads to it.
    """
    if blocks <= at_most:
        return list(range(1, blocks + 1))
    return [blocks * number // at_most for number in range(1, at_most + 1)]
