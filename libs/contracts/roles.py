"""Roles in words: `prefill`, `decode`, `mixed`, `standby`. On the wire, decode is MIXED with budget 0."""

from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    ROLE_PREFILL,
    ROLE_STANDBY,
    Assignment,
    Role,
    RoleChange,
)
from libs.policy.roles import MAX_BUDGET_TOKENS

# A planner's default id begins with this prefix. Changes by other actors count as made by a person.
PLANNERS: Final = "planner"
NO_REASON: Final = "no reason given"
ROLE_NAMES: Final = ("prefill", "decode", "mixed", "standby")


def role_name(assignment: Assignment) -> str:
    """Return the name of an assignment's role, one of `ROLE_NAMES`."""
    if assignment.role == ROLE_PREFILL:
        return "prefill"
    if assignment.role == ROLE_MIXED:
        return "mixed" if assignment.budget_tokens else "decode"
    return "standby"


def is_by_hand(change: RoleChange) -> bool:
    """Return whether a person made a change of role."""
    return bool(change.actor) and not change.actor.startswith(PLANNERS)


def role_from_name(name: str, budget_tokens: int = 0) -> tuple[Role, int]:
    """Return role and budget as on the wire. Raise ValueError, which names the allowed values."""
    if name == "prefill":
        return ROLE_PREFILL, 0
    if name == "decode":
        return ROLE_MIXED, 0
    if name == "mixed":
        if not 1 <= budget_tokens <= MAX_BUDGET_TOKENS:
            raise ValueError(f"role mixed needs a budget of 1 to {MAX_BUDGET_TOKENS} prompt tokens a step")
        return ROLE_MIXED, budget_tokens
    if name == "standby":
        return ROLE_STANDBY, 0
    raise ValueError(f"role {name!r} is not one of {', '.join(ROLE_NAMES)}")
