"""What a look-up asks and what its answers mean. Pure."""

from collections.abc import Mapping, Sequence


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
