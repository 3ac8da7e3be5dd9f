"""A worker's assignment, which changes by compare-and-set on its epoch, the sequences that it takes under it, and what
it keeps of a model that it leaves.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from libs.policy.roles import MAX_BUDGET_TOKENS, Assigned, Assignment, Phase, Refusal, Role, serves

FIRST_EPOCH: Final = 1


@dataclass(frozen=True, slots=True)
class WantedAssignment:
    """An assignment that a caller requests for a worker."""

    role: int
    """The number of a `Role`, not validated yet."""
    budget_tokens: int
    expected_epoch: int
    """The epoch of the assignment that this one replaces."""
    model: str = ""
    """The model that the caller expects on the worker; empty accepts any."""


class AssignmentRefusal(Enum):
    DRAINING = auto()
    STALE_EPOCH = auto()
    OTHER_MODEL = auto()
    UNKNOWN_ROLE = auto()
    BUDGET_WITHOUT_MIXED = auto()
    BUDGET_TOO_LARGE = auto()


def first_assignment(
    model: str, role: int, budget_tokens: int, epoch: int = FIRST_EPOCH
) -> Assignment | AssignmentRefusal:
    """Return the assignment for a model that is new on the worker; epochs continue across models."""
    return _assignment(model, role, budget_tokens, epoch)


def next_assignment(current: Assignment, wanted: WantedAssignment, *, draining: bool) -> Assignment | AssignmentRefusal:
    """Return the assignment that follows `current`, or the reason why the requested one is rejected."""
    if draining:
        return AssignmentRefusal.DRAINING
    if wanted.expected_epoch != current.epoch:
        return AssignmentRefusal.STALE_EPOCH
    if wanted.model and wanted.model != current.model:
        return AssignmentRefusal.OTHER_MODEL
    return _assignment(current.model, wanted.role, wanted.budget_tokens, current.epoch + 1)


def role_refusal(assignment: Assigned, phase: int, *, draining: bool) -> Refusal | None:
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


def _assignment(model: str, role: int, budget_tokens: int, epoch: int) -> Assignment | AssignmentRefusal:
    if role not in (Role.PREFILL, Role.MIXED, Role.STANDBY):
        return AssignmentRefusal.UNKNOWN_ROLE
    if budget_tokens and role != Role.MIXED:
        return AssignmentRefusal.BUDGET_WITHOUT_MIXED
    if budget_tokens > MAX_BUDGET_TOKENS:
        return AssignmentRefusal.BUDGET_TOO_LARGE
    return Assignment(model, Role(role), budget_tokens, epoch)


@dataclass(slots=True)
class LatestLead:
    """The latest lead under which a planner has called the worker.

    Two planners may both believe that they lead, for example if Redis is partitioned. The worker then obeys the one
    whose lead began later, whatever epoch the other knows.
    """

    term: int = 0

    def outruns(self, term: int) -> bool:
        """Return whether a later lead has called before, and remember a later `term`. Calls by people have term 0."""
        late = 0 < term < self.term
        self.term = max(self.term, term)
        return late


class Invalid(Enum):
    """The reason behind Refusal.INVALID, as far as it shows before the sequence's tokens are read."""

    PHASE_MISSING = auto()
    OTHER_MODEL = auto()
    ADAPTER = auto()


@dataclass(frozen=True, slots=True)
class WorkerReadiness:
    """The state of a worker that decides which sequences it can take now."""

    assignment: Assigned
    draining: bool
    kv_layout: str
    has_credit: bool
    """True if the gateway held a credit for the sequence."""


def invalid(
    phase: int, model: str, adapter: str, *, worker_model: str, adapters: Collection[str] = (), loadable: bool = False
) -> Invalid | None:
    """Return the fault that makes a sequence invalid in every role of the worker, or None. Checked before `refusal`.

    `adapters` are those loaded when the worker started. `loadable` says that it can load the sequence's adapter
    now.
    """
    if phase not in (Phase.PREFILL, Phase.DECODE, Phase.BOTH):
        return Invalid.PHASE_MISSING
    if model != worker_model:
        return Invalid.OTHER_MODEL
    return Invalid.ADAPTER if adapter and adapter not in adapters and not loadable else None


def refusal(phase: int, kv_layout: str | None, worker: WorkerReadiness) -> Refusal | None:
    """Return why the worker cannot take a valid sequence now, or None.

    `kv_layout` is that of the blocks that the sequence comes with; None if it has none.
    """
    code = role_refusal(worker.assignment, phase, draining=worker.draining)
    if code is not None:
        return code
    if kv_layout is not None and kv_layout != worker.kv_layout:
        return Refusal.KV_MISMATCH
    return None if worker.has_credit else Refusal.NO_CAPACITY


class Leaving(Enum):
    CLOSED = "closed"
    WITHOUT_WEIGHTS = "without weights"
    """The engine's processes stay, so waking up reads only the weights."""
    WITH_WEIGHTS = "with weights"
    """The weights stay too, in host memory."""


def leave(size_bytes: int, *, host_bytes: int, sleeps: bool, drops_weights: bool) -> Leaving:
    """Return the most that can stay of a model with weights of this size.

    `host_bytes` is the host memory for all sleeping models.
    """
    if not sleeps or not host_bytes:
        return Leaving.CLOSED
    if size_bytes <= host_bytes:
        return Leaving.WITH_WEIGHTS
    return Leaving.WITHOUT_WEIGHTS if drops_weights else Leaving.CLOSED


def too_many(held: Sequence[int], wanted: int, most: int) -> int:
    """Return how many of the held models must go, longest unused first, so that `wanted` fits within `most`."""
    over, gone = sum(held) + wanted - most, 0
    while over > 0 and gone < len(held):
        over -= held[gone]
        gone += 1
    return gone
