"""What one step computes, and which sequences give way when KV runs out. Pure.

When KV runs out, older sequences take the blocks of the youngest, which is computed again later. Progress is certain:
the oldest running sequence is never preempted, and whatever fits the pool alone can end. Thrash is bounded: a sequence
is admitted beside others only where each of them, itself included, can still take a whole block.
"""

from collections.abc import Iterable

from libs.engine.kv.block_pool import BlockPool
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


def blocks_to_spare(admitted: Sequence, holding: Iterable[Sequence]) -> int:
    """Blocks that must stay available when a sequence joins those that hold blocks: one for each that may grow."""
    return admitted.may_grow + sum(sequence.may_grow for sequence in holding)


def grow(running: list[Sequence], pool: BlockPool) -> list[Sequence]:
    """Give running sequences, oldest first, blocks for their tokens; the answer are those that lost theirs instead.

    The oldest waits without room where only leases and transfers hold what it needs. A prompt whose blocks are pulled
    while it is computed keeps them: to take them would free nothing as long as its receiver holds the handle.
    """
    victims, preempted = [sequence for sequence in running[1:] if sequence.streamed is None], []
    for sequence in running:
        while not (sequence.has_room or sequence in preempted):
            blocks = pool.allocate(sequence.blocks_now - len(sequence.blocks))
            if blocks is not None:
                sequence.grow(blocks)
            elif victims:
                victim = victims.pop()
                pool.release(victim.preempt())
                preempted.append(victim)
            else:
                return preempted
        if sequence in preempted:
            break
    return preempted
