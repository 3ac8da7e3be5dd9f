"""Which work a worker takes: its assignment, changed by compare-and-set on the epoch. Pure."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from libs.policy.roles import MAX_BUDGET_TOKENS, Assigned, Assignment, Phase, Refusal, Role, serves

FIRST_EPOCH: Final = 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """The assignment that somebody asks for."""

    role: int
    """Of `Role`, if it is one at all."""
    budget_tokens: int
    expected_epoch: int
    """Of the assignment that this one is to follow."""
    model: str = ""
    """That the asker takes the worker to hold; empty: any."""


class NotTaken(Enum):
    """Why an assignment is not taken."""

    DRAINING = auto()
    STALE_EPOCH = auto()
    OTHER_MODEL = auto()
    UNKNOWN_ROLE = auto()
    BUDGET_WITHOUT_MIXED = auto()
    BUDGET_TOO_LARGE = auto()


def first_assignment(model: str, role: int, budget_tokens: int, epoch: int = FIRST_EPOCH) -> Assignment | NotTaken:
    """What a worker starts with, or with a model that it is given later: epochs go on over models."""
    return _assignment(model, role, budget_tokens, epoch)


def next_assignment(current: Assignment, wanted: Wanted, *, draining: bool) -> Assignment | NotTaken:
    """What the worker does once it has taken what is wanted, or why it does not take it."""
    if draining:
        return NotTaken.DRAINING
    if wanted.expected_epoch != current.epoch:
        return NotTaken.STALE_EPOCH
    if wanted.model and wanted.model != current.model:
        return NotTaken.OTHER_MODEL
    return _assignment(current.model, wanted.role, wanted.budget_tokens, current.epoch + 1)


def refusal(assignment: Assigned, phase: int, *, draining: bool) -> Refusal | None:
    """Why new work of `phase` is not taken, or None.

    The epoch that the gateway routed by does not matter as long as the phase still fits: a change of budget, or a move
    there and back, refuses no work.
    """
    if draining:
        return Refusal.DRAINING
    return None if serves(assignment, phase) else Refusal.STALE_ROLE


def leaves_decode(assignment: Assigned, *, draining: bool) -> bool:
    """Whether sequences that still decode are work of a role that has been left."""
    return draining or not serves(assignment, Phase.DECODE)


def _assignment(model: str, role: int, budget_tokens: int, epoch: int) -> Assignment | NotTaken:
    if role not in (Role.PREFILL, Role.MIXED, Role.STANDBY):
        return NotTaken.UNKNOWN_ROLE
    if budget_tokens and role != Role.MIXED:
        return NotTaken.BUDGET_WITHOUT_MIXED
    if budget_tokens > MAX_BUDGET_TOKENS:
        return NotTaken.BUDGET_TOO_LARGE
    return Assignment(model, Role(role), budget_tokens, epoch)
