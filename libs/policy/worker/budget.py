"""The number of prompt tokens that an engine step may compute beside decodes."""

from collections.abc import Iterable
from typing import Final, Protocol

from libs.policy.roles import Assigned, Role

# Nothing decodes in role prefill, so the engine's own chunk size is the only limit.
WHOLE_CHUNK_TOKENS: Final = 1 << 30


class TakenSequence(Protocol):
    """A sequence that was accepted under some prompt budget."""

    @property
    def budget_tokens(self) -> int:
        """The budget of the role in which the worker accepted the sequence."""
        ...

    @property
    def awaits_prompt(self) -> bool:
        """Whether this worker still has to compute the prompt."""
        ...

    @property
    def yields(self) -> bool:
        """Whether the prompt waits while another one can be computed."""
        ...


def role_budget(assignment: Assigned) -> int:
    if assignment.role == Role.PREFILL:
        return WHOLE_CHUNK_TOKENS
    return assignment.budget_tokens if assignment.role == Role.MIXED else 0


def engine_budget(own_tokens: int, taken: Iterable[TakenSequence]) -> int:
    """Return the prompt budget of the engine: the role's own, or a larger one that accepted prompts still need.

    A larger budget lasts until the prompts accepted under it are computed. Yielding prompts keep it only where the
    role's own budget would never compute them.
    """
    awaited = (each.budget_tokens for each in taken if each.awaits_prompt and not (own_tokens and each.yields))
    return max(own_tokens, max(awaited, default=0))
