"""How many prompts and decodes a worker takes at once: the total of its credits. Pure."""

from dataclasses import dataclass
from typing import Final

from libs.policy.roles import Role
from libs.policy.speed import HAND_OVER_S

MIN_PROMPTS: Final = 4
MAX_PROMPTS: Final = 64
"""Prompts at the worker at once. The rest wait in the gateways, where they can still go elsewhere."""
FILLED_STEPS: Final = 2
"""Of short prompts as many as fill the running step and the next one, and what is computed in `HAND_OVER_S`."""

LONG_PROMPT_TOKENS: Final = 1024.0
"""What prompts are taken for before any has come."""
PROMPTS_AVERAGED: Final = 16


class PromptLength:
    """How long late prompts were, in the mean."""

    def __init__(self) -> None:
        self.mean_tokens = LONG_PROMPT_TOKENS

    def came(self, tokens: int) -> None:
        """One more prompt was taken."""
        self.mean_tokens += (tokens - self.mean_tokens) / PROMPTS_AVERAGED


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What a role's number of slots follows from."""

    max_sequences: int
    """In the engine's running batch."""
    prompt_tokens: float
    """Mean length of late prompts."""
    chunk_tokens: int
    """Prompt tokens that one step computes at most."""
    step_s: float
    """What such a step takes, as far as is known; more than 0."""
    decoding: int = 0
    """Sequences that take a place in the batch against decode credits, whichever role gave them out."""


def slots(role: int, facts: SlotFacts) -> tuple[int, int]:
    """How many (prefill, decode) requests a worker of `role` takes at once.

    A sequence that is computed from start to end takes a decode slot, where it spends nearly all its time.
    """
    if role == Role.PREFILL:
        return prefill_slots(facts), 0
    return (0, facts.max_sequences) if role == Role.MIXED else (0, 0)


def prefill_slots(facts: SlotFacts) -> int:
    """A few prompts, more of short ones. In powers of two: a new mean is seldom another number.

    Never more than the engine has places for: what decodes on from another role has its own until it ends or moves,
    and meanwhile a prompt waits better in its gateway. With no place none is taken: decodes need no prompt to end.
    """
    wanted_tokens = facts.chunk_tokens * (FILLED_STEPS + HAND_OVER_S / facts.step_s)
    prompts = MIN_PROMPTS
    while prompts < MAX_PROMPTS and prompts * facts.prompt_tokens < wanted_tokens:
        prompts *= 2
    return min(prompts, max(facts.max_sequences - facts.decoding, 0))
