"""Roles of workers, phases of requests, and which role serves which phase.

The numbers are those of proto/fulcrum, so an edge converts a message's number to `Role`, `Phase` or `Refusal` directly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

MAX_BUDGET_TOKENS: Final = 1_000_000
"""The largest budget of role mixed, in prompt tokens a step."""
MAX_NAMED: Final = 4
"""The maximum number of workers named in one sentence."""


class Role(IntEnum):
    """The kind of work that a worker accepts; decode is MIXED with budget 0."""

    PREFILL = 1
    MIXED = 2
    STANDBY = 3


class Phase(IntEnum):
    """The part of a request that a worker computes."""

    PREFILL = 1
    """Compute the prompt and keep its blocks for a receiver."""
    DECODE = 2
    """Pull the blocks and continue token by token."""
    BOTH = 3
    """Compute the whole request on one worker."""


class Refusal(IntEnum):
    """The reason why a worker refuses a sequence."""

    STALE_ROLE = 1
    """The worker's assignment does not include the phase."""
    NO_CAPACITY = 2
    DRAINING = 3
    INVALID = 4
    """The sequence is invalid on every worker."""
    KV_MISMATCH = 5
    """The blocks have another layout than the worker's engine."""


class Assigned(Protocol):
    """An assignment's role and budget, in a record or in a message."""

    @property
    def role(self) -> int:
        """The number of a `Role` as the message holds it."""
        ...

    @property
    def budget_tokens(self) -> int:
        """The prompt tokens of a step in role mixed."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """The work assigned to a worker; changes are compare-and-set on `epoch`, which only increases."""

    model: str
    role: Role
    budget_tokens: int
    epoch: int


def serves(assignment: Assigned, phase: int) -> bool:
    """Return whether new work of `phase` fits the assignment; a worker refuses the rest with STALE_ROLE."""
    if phase == Phase.PREFILL:
        return assignment.role == Role.PREFILL
    if phase == Phase.DECODE:
        return assignment.role == Role.MIXED
    return phase == Phase.BOTH and assignment.role == Role.MIXED and assignment.budget_tokens > 0


def ended_by(before: Iterable[Assigned], after: Iterable[Assigned]) -> tuple[Phase, ...]:
    """Return the phases that some of a model's workers served before and none serves after."""
    were, will_be = list(before), list(after)
    phases = (Phase.PREFILL, Phase.DECODE)
    return tuple(each for each in phases if _served(were, each) and not _served(will_be, each))


def end_refusal(model: str, movers: Sequence[str], ended: Sequence[Phase], *, force: str) -> str:
    """Return the refusal to move the last workers that serve a phase of a model. `force` is the text on how to override
    it.
    """
    one = len(movers) == 1
    does = {Phase.PREFILL: f"compute{'s' * one} prompts", Phase.DECODE: f"decode{'s' * one}"}
    what = " and ".join(does[phase] for phase in ended)
    names = ", ".join(movers[:MAX_NAMED]) + (f" and {len(movers) - MAX_NAMED} more" if len(movers) > MAX_NAMED else "")
    alone = "is the last worker" if one else "are the last workers"
    return (
        f"{names} {alone} of {model} that {what}: without {'it' if one else 'them'} its requests would wait and fail."
        f" Give another worker the role first, or {force}"
    )


def _served(workers: Iterable[Assigned], phase: Phase) -> int:
    """Count the workers that serve a phase, alone or together with the other one."""
    return sum(serves(each, phase) or (phase is Phase.PREFILL and serves(each, Phase.BOTH)) for each in workers)
