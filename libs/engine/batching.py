"""What one step computes. Pure."""

from collections.abc import Iterable

from libs.engine.runner import Batch
from libs.engine.sequence import Sequence


def compose(
    decodes: Iterable[Sequence], prompts: Iterable[Sequence], budget_tokens: int, recompute_tokens: int
) -> Batch:
    """Every decode, then prompt chunks in the given order up to the budget; sequences without room for it wait.

    A transferred sequence computes at least one token a step whatever the budget: with budget 0 it would never start.
    What preemption made a sequence lose is not the prompts' affair: it has a budget of its own, `recompute_tokens`.
    """
    chunks = [sequence.chunk(1) for sequence in decodes if sequence.has_room]
    for sequence in prompts:
        if not sequence.has_room:
            continue
        if sequence.pending_free:
            tokens = min(sequence.pending_free, recompute_tokens)
            recompute_tokens -= tokens
            if tokens:
                chunks.append(sequence.chunk(tokens))
            continue
        tokens = min(sequence.pending, max(budget_tokens, 1 if sequence.request.kv else 0))
        if tokens:
            chunks.append(sequence.chunk(tokens))
            budget_tokens = max(budget_tokens - tokens, 0)
    return Batch(tuple(chunks))


def unless_others_wait(prompts: Iterable[Sequence]) -> list[Sequence]:
    """Without prompts that yield, where another one can be computed: in one step they would lengthen its wait."""
    every = list(prompts)
    first = [sequence for sequence in every if not sequence.request.yields and sequence.has_room]
    return [sequence for sequence in every if not sequence.request.yields or sequence.request.kv] if first else every
