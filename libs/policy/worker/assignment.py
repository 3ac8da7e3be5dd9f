"""A worker's assignment, which changes by compare-and-set on its epoch."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from libs.policy.roles import MAX_BUDGET_TOKENS, Assigned, Assignment, Phase, Refusal, Role, serves

FIRST_EPOCH: Final = 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """An assignment that a caller requests for a worker."""

    role: int
    """The number of a `Role`, not validated yet."""
    budget_tokens: int
    expected_epoch: int
    """The epoch of the assignment that this one replaces."""
    model: str = ""
    """The model that the caller expects on the worker; empty accepts any."""


class NotTaken(Enum):
    DRAINING = auto()
    STALE_EPOCH = auto()
    OTHER_MODEL = auto()
    UNKNOWN_ROLE = auto()
    BUDGET_WITHOUT_MIXED = auto()
    BUDGET_TOO_LARGE = auto()


def first_assignment(model: str, role: int, budget_tokens: int, epoch: int = FIRST_EPOCH) -> Assignment | NotTaken:
    """Return the assignment for a model that is new on the worker; epochs continue across models."""
    return _assignment(model, role, budget_tokens, epoch)


def next_assignment(current: Assignment, wanted: Wanted, *, draining: bool) -> Assignment | NotTaken:
    """Return the assignment that follows `current`, or the reason why the requested one is rejected."""
    if draining:
        return NotTaken.DRAINING
    if wanted.expected_epoch != current.epoch:
        return NotTaken.STALE_EPOCH
    if wanted.model and wanted.model != current.model:
        return NotTaken.OTHER_MODEL
    return _assignment(current.model, wanted.role, wanted.budget_tokens, current.epoch + 1)


def refusal(assignment: Assigned, phase: int, *, draining: bool) -> Refusal | None:
    """Return why new work of `phase` is refused, or None.

    The gateway's epoch does not matter as long as the phase still fits. A change of budget, or a move there and
    back, refuses no work.
    """
    if draining:
        return Refusal.DRAINING
    return None if serves(assignment, phase) else Refusal.STALE_ROLE


def leaves_decode(assignment: Assigned, *, draining: bool) -> bool:
    """Return whether running decodes belong to a role that the worker has left."""
    return draining or not serves(assignment, Phase.DECODE)


def _assignment(model: str, role: int, budget_tokens: int, epoch: int) -> Assignment | NotTaken:
    if role not in (Role.PREFILL, Role.MIXED, Role.STANDBY):
        return NotTaken.UNKNOWN_ROLE
    if budget_tokens and role != Role.MIXED:
        return NotTaken.BUDGET_WITHOUT_MIXED
    if budget_tokens > MAX_BUDGET_TOKENS:
        return NotTaken.BUDGET_TOO_LARGE
    return Assignment(model, Role(role), budget_tokens, epoch)
