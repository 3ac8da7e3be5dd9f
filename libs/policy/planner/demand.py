"""What a model's workers have to do, from what they say: prompts, and decodes to come. Pure."""

from typing import Final

HORIZON_NS: Final = 1_000_000_000
"""Within which what waits is to be computed."""


def prompts_wanted(served: float, waiting_ns: float) -> float:
    """Workers' worth of prompts; `served`: computed of late, `waiting_ns`: what one worker would take for what waits.

    While all that comes is served, that is what is wanted. What a cluster falls behind shows in what waits.
    """
    return served + waiting_ns / HORIZON_NS


def pressing_tokens(served: float, hopeful_tokens: int, waiting_tokens: int) -> int:
    """Prompt tokens at gateways that press. Those that can no longer be in time are served by what others leave; where
    nothing is served, nothing leaves them anything, and they press as well."""
    return hopeful_tokens if served else max(hopeful_tokens, waiting_tokens)


def decodes_to_come(running: int, waiting: int, prompt_tokens: int) -> tuple[int, float]:
    """Sequences that decode soon, of a prefill worker's prompts, and the KV tokens that they bring: those that it
    computes. One that waits decodes no sooner than one before it has ended, and takes its place.

    prompt_tokens: of all of them, still to be computed."""
    if not running:
        return 0, 0.0
    return running, prompt_tokens * running / (running + waiting)
