"""What happens when KV runs out: older sequences take the blocks of the youngest, which is computed again later. Pure.

Progress is certain: the oldest running sequence is never preempted, and whatever fits the pool alone can end. Thrash is
bounded: a sequence is admitted beside others only where each of them, itself included, can still take a whole block.
"""

from collections.abc import Iterable

from libs.engine.block_pool import BlockPool
from libs.engine.sequence import Sequence


def blocks_to_spare(admitted: Sequence, holding: Iterable[Sequence]) -> int:
    """Blocks that must stay available when a sequence joins those that hold blocks: one for each that may grow."""
    return admitted.may_grow + sum(sequence.may_grow for sequence in holding)


def grow(running: list[Sequence], pool: BlockPool) -> list[Sequence]:
    """Give running sequences, oldest first, blocks for their tokens; the answer are those that lost theirs instead.

    The oldest waits without room where only leases and transfers hold what it needs. A prompt whose blocks are pulled
    while it is computed keeps them: to take them would free nothing as long as its receiver holds the handle.
    """
    victims, preempted = [sequence for sequence in running[1:] if sequence.opened is None], []
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
