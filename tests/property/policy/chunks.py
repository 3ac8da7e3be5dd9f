"""The chunks of a step that takes prompts in order, for tests of prompt budgets."""

from collections.abc import Sequence


def first_chunks(prompts: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The chunks that `tokens` tokens make when prompts, each (start, end), are served in order."""
    chunks = []
    for start, end in prompts:
        if tokens <= 0:
            break
        taken = min(end - start, tokens)
        chunks.append((start, start + taken))
        tokens -= taken
    return chunks
