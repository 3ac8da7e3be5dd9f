"""What workers do, what requests need done, and which fits which. Pure.

Numbers are those of proto/fulcrum: an edge turns a message's number into a `Role`, `Phase` or `Refusal` as it is.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

MAX_BUDGET_TOKENS: Final = 1_000_000
"""Of role mixed, a step."""


class Role(IntEnum):
    """What a worker takes; decode is MIXED with budget 0."""

    PREFILL = 1
    MIXED = 2
    STANDBY = 3


class Phase(IntEnum):
    """What a worker is to do for a request."""

    PREFILL = 1
    """Compute the prompt, keep its blocks for a receiver."""
    DECODE = 2
    """Pull blocks, go on token by token."""
    BOTH = 3
    """All of it on one worker."""


class Refusal(IntEnum):
    """Why a worker does not take a sequence."""

    STALE_ROLE = 1
    """Its assignment does not have the phase."""
    NO_CAPACITY = 2
    DRAINING = 3
    INVALID = 4
    """No worker would take it."""
    KV_MISMATCH = 5
    """The blocks have another layout than its engine."""


class Assigned(Protocol):
    """What a worker is asked to do, as a record or as a message."""

    @property
    def role(self) -> int:
        """Number of a `Role`."""
        ...

    @property
    def budget_tokens(self) -> int:
        """Prompt tokens of role mixed, a step."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is asked to do. Changes are compare-and-set on `epoch`, which only ever grows."""

    model: str
    role: Role
    budget_tokens: int
    epoch: int


def serves(assignment: Assigned, phase: int) -> bool:
    """Whether new work of `phase` fits the assignment; the worker refuses what does not with STALE_ROLE."""
    if phase == Phase.PREFILL:
        return assignment.role == Role.PREFILL
    if phase == Phase.DECODE:
        return assignment.role == Role.MIXED
    return phase == Phase.BOTH and assignment.role == Role.MIXED and assignment.budget_tokens > 0
