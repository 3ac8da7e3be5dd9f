"""Letting go of what a choice holds on workers."""

from services.gateway.generation import Generation


def release(generation: Generation, *, keep_kv: bool) -> None:
    """Let go of everything on workers, except blocks that are to wait for another decode worker."""
    if generation.kv_given:
        give_up_blocks(generation)
    if generation.decode_leg is not None:
        generation.decode_leg.link.forget(generation.decode_leg, abort=True)
        generation.decode_leg = None
    if not keep_kv:
        forget_prompt(generation, abort=True)
        generation.kv = generation.kv_open = None
    if generation.reserved is not None:
        generation.reserved.release(generation)


def give_up_blocks(generation: Generation) -> None:
    """Leave blocks that can be read once to the decode worker that has them: whoever else reads them may find
    another prompt's. Freed at their source they could become that while it reads, and stay in its prefix cache;
    that it is done with them, or gone, the source learns by itself.
    """
    forget_prompt(generation, abort=False)
    generation.kv = None


def forget_prompt(generation: Generation, *, abort: bool) -> None:
    """Listen to its prompt's worker no more; `abort` also ends it there, or frees the blocks it left."""
    if generation.prompt_leg is not None:
        generation.prompt_leg.link.forget(generation.prompt_leg, abort=abort)
        generation.prompt_leg = None
