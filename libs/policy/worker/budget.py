"""How many prompt tokens an engine's step may compute beside decodes. Pure."""

from collections.abc import Iterable
from typing import Final, Protocol

from libs.policy.roles import Assigned, Role

WHOLE_CHUNK_TOKENS: Final = 1 << 30
"""Nothing decodes in role prefill, so a step takes as much as the engine's own chunk size allows."""


class TakenSequence(Protocol):
    """A sequence that was taken under some budget."""

    @property
    def budget_tokens(self) -> int:
        """The role's when it was taken."""
        ...

    @property
    def awaits_prompt(self) -> bool:
        """Whether its prompt is still to be computed here."""
        ...

    @property
    def yields(self) -> bool:
        """Whether its prompt waits while another's can be computed."""
        ...


def role_budget(assignment: Assigned) -> int:
    """Prompt tokens that a step may compute in this role."""
    if assignment.role == Role.PREFILL:
        return WHOLE_CHUNK_TOKENS
    return assignment.budget_tokens if assignment.role == Role.MIXED else 0


def engine_budget(own_tokens: int, taken: Iterable[TakenSequence]) -> int:
    """The engine's: the role's own, or a larger one until the prompts that were taken under it are computed.

    Prompts that yield are waited for only where the role's own budget would never compute them.
    """
    awaited = (each.budget_tokens for each in taken if each.awaits_prompt and not (own_tokens and each.yields))
    return max(own_tokens, max(awaited, default=0))
