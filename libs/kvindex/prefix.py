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
