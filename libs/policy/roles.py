"""What workers do, what requests need done, and which fits which. Pure.

Numbers are those of proto/fulcrum: an edge turns a message's number into a `Role`, `Phase` or `Refusal` as it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

MAX_BUDGET_TOKENS: Final = 1_000_000
"""Of role mixed, a step."""
MAX_NAMED: Final = 4
"""Workers that one sentence names."""


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


def ended_by(before: Iterable[Assigned], after: Iterable[Assigned]) -> tuple[Phase, ...]:
    """Return the phases of requests that some of a model's workers served, and none will."""
    were, will_be = list(before), list(after)
    phases = (Phase.PREFILL, Phase.DECODE)
    return tuple(each for each in phases if _served(were, each) and not _served(will_be, each))


def end_refusal(model: str, movers: Sequence[str], ended: Sequence[Phase], *, force: str) -> str:
    """Return why workers are not taken from a model's last phase; `force`: how to do it all the same."""
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
    """Count the workers that serve a phase, together with the other one or alone."""
    return sum(serves(each, phase) or (phase is Phase.PREFILL and serves(each, Phase.BOTH)) for each in workers)
