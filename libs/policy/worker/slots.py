"""The number of prompts and decodes that a worker accepts at once, which is the total of its credits."""

from dataclasses import dataclass
from typing import Final

from libs.policy.roles import Role
from libs.policy.speed import HAND_OVER_S

MIN_PROMPTS: Final = 4
# Other prompts wait in the gateways, where they can still go to another worker.
MAX_PROMPTS: Final = 64
# Short prompts get slots to fill the running step, the next one, and the time of a hand-over (`HAND_OVER_S`).
FILLED_STEPS: Final = 2

LONG_PROMPT_TOKENS: Final = 1024.0
"""The prompt length assumed before the first prompt."""
PROMPTS_AVERAGED: Final = 16


class PromptLength:
    """A running mean of the lengths of recent prompts."""

    def __init__(self) -> None:
        self.mean_tokens = LONG_PROMPT_TOKENS

    def came(self, tokens: int) -> None:
        """Add the length of an accepted prompt."""
        self.mean_tokens += (tokens - self.mean_tokens) / PROMPTS_AVERAGED


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The figures that determine a role's number of slots."""

    max_sequences: int
    """The most sequences in the engine's running batch."""
    prompt_tokens: float
    """The mean length of recent prompts."""
    chunk_tokens: int
    """The most prompt tokens that one step computes."""
    step_s: float
    """The known or assumed time of a step of `chunk_tokens`; greater than 0."""
    decoding: int = 0
    """Sequences that occupy the batch against decode credits, whichever role granted them."""


def slots(role: int, facts: SlotFacts) -> tuple[int, int]:
    """Return how many (prefill, decode) requests a worker of `role` accepts at once.

    A sequence computed from start to end takes a decode slot, where it spends nearly all its time.
    """
    if role == Role.PREFILL:
        return prefill_slots(facts), 0
    return (0, facts.max_sequences) if role == Role.MIXED else (0, 0)


def prefill_slots(facts: SlotFacts) -> int:
    """Return the number of prompt slots, larger for short prompts.

    It is a power of two within the bounds, so a new mean seldom changes it. It never exceeds the engine's free
    places: sequences that still decode from another role keep theirs, and a prompt waits better in its gateway. It
    may be 0, as decodes need no prompt to end.
    """
    wanted_tokens = facts.chunk_tokens * (FILLED_STEPS + HAND_OVER_S / facts.step_s)
    prompts = MIN_PROMPTS
    while prompts < MAX_PROMPTS and prompts * facts.prompt_tokens < wanted_tokens:
        prompts *= 2
    return min(prompts, max(facts.max_sequences - facts.decoding, 0))
