"""Composition of a step, and preemption when KV runs out. Pure.

When KV runs out, older sequences take the blocks of the youngest one, which is computed again later. Progress is
guaranteed: the oldest running sequence is never preempted, and whatever fits the pool alone can finish. Thrashing
is bounded, because a sequence is admitted beside others only while each of them can still take a whole block.
"""

from collections.abc import Iterable

from libs.engine.kv.block_pool import BlockPool
from libs.engine.runner import Batch
from libs.engine.sequence import Sequence


def compose(
    decodes: Iterable[Sequence], prompts: Iterable[Sequence], budget_tokens: int, recompute_tokens: int
) -> Batch:
    """Return every decode, then prompt chunks in the given order up to the budget. Sequences without room are left
    out.

    A transferred sequence computes at least one token a step, since with budget 0 it would never start. Tokens that
    preemption lost have a budget of their own, `recompute_tokens`, and take nothing from other prompts.
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
    """Return the prompts without those that yield, if any other can be computed.

    In a shared step, prompts that yield would lengthen the wait of the others.
    """
    every = list(prompts)
    first = [sequence for sequence in every if not sequence.request.yields and sequence.has_room]
    return [sequence for sequence in every if not sequence.request.yields or sequence.request.kv] if first else every


def blocks_to_spare(admitted: Sequence, holding: Iterable[Sequence]) -> int:
    """Return how many blocks must stay free when a sequence is admitted: one for each sequence that may grow."""
    return admitted.may_grow + sum(sequence.may_grow for sequence in holding)


def grow(running: list[Sequence], pool: BlockPool) -> list[Sequence]:
    """Allocate blocks for the tokens of running sequences, oldest first, and return the sequences preempted for it.

    The oldest waits without room if only leases and transfers hold the blocks that it needs. A prompt that is
    pulled while it is computed keeps its blocks. Taking them would free nothing while its receiver holds the
    handle.
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
