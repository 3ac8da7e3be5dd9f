"""The pure parts of the KV index: the queries and results of look-ups, and a worker's copy of its own entries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# The most blocks listed per worker, which take about 100 MB for hashes here and as much in the store.
MAX_LISTED_BLOCKS = 1_000_000


@dataclass(slots=True)
class Mirror:
    """A copy of the blocks that the store lists for one worker."""

    lease_ms: int
    blocks: set[bytes] = field(default_factory=set)
    in_doubt: bool = False
    """Whether the store may differ, because a change was not confirmed. If so, the whole copy is written again."""

    def apply(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> list[bytes]:
        """Apply a change, stored blocks before removed ones, and return the stored blocks to be listed."""
        room = MAX_LISTED_BLOCKS - len(self.blocks)
        listed = list(stored[: max(0, room)])
        self.blocks.update(listed)
        self.blocks.difference_update(removed)
        return listed


def distinct(hashes: Sequence[Sequence[bytes]]) -> list[bytes]:
    # Prompts that begin alike share their first blocks.
    return list(dict.fromkeys(block for prompt in hashes for block in prompt))


def leading_blocks(prompt: Sequence[bytes], held: Mapping[bytes, bool]) -> int:
    """Return the length of the prompt's longest prefix of held blocks."""
    for count, block in enumerate(prompt):
        if not held[block]:
            return count
    return len(prompt)


def probes(blocks: int, at_most: int) -> list[int]:
    """Return the depths in 1..blocks to probe for a prefix: all of them, or `at_most` evenly spaced ones up to the
    last.

    A chained hash represents all blocks before it, and pools evict a chain from its end. A holder of one block
    therefore holds all blocks that lead to it.
    """
    if blocks <= at_most:
        return list(range(1, blocks + 1))
    return [blocks * number // at_most for number in range(1, at_most + 1)]
