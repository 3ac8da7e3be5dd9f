"""A worker's assignment, which changes by compare-and-set on its epoch, and the consequences of a change.

These are the sequences that the worker accepts, those that it hands over, and the parts that it keeps of a model that
it leaves.
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
        """Return whether a later lead has called before, and remember a newer `term`. Calls by people have term 0."""
        late = 0 < term < self.term
        self.term = max(self.term, term)
        return late


class Invalid(Enum):
    """The reason behind Refusal.INVALID that is visible before the sequence's tokens are read."""

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

    `adapters` are those loaded when the worker started. `loadable` means that it can load the sequence's adapter now.
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


REMEMBERED = 0.95
"""The factor by which each new hand-over scales the weight of earlier ones."""
WEIGHT = 0.2
"""The weight of the newest observation in a running mean."""
PRIOR_WEIGHT = 0.25
MAX_WAIT_S: Final = 5.0
"""The maximum time that a worker that left decode waits for a sequence that could be recomputed elsewhere."""
PRIOR = ((0.0, 0.005), (1e9, 1.0))
"""The assumed (bytes, seconds): binding takes two turns of a stream and a step; the link carries 1 GB/s."""


class HandOverTime:
    """The duration of a hand-over as a linear function of its bytes.

    The line is fitted to observations on top of a prior. Its intercept is the time to bind, its slope the link.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, kv_bytes: int, seconds: float) -> None:
        """Record the time from sealing the blocks to their arrival."""
        self._sums = _add(_scaled(self._sums, REMEMBERED), kv_bytes, seconds)

    def seconds(self, kv_bytes: int) -> float:
        """Return the expected time to hand over `kv_bytes`; never negative, and never less for more bytes."""
        sums = self._sums
        for prior_bytes, prior_s in PRIOR:
            sums = _add(sums, prior_bytes, prior_s, PRIOR_WEIGHT)
        count, x, y, xx, xy = sums
        slope = (count * xy - x * y) / (count * xx - x * x)
        if slope < 0:
            return y / count
        binding_s = (y - slope * x) / count
        if binding_s < 0:  # fit the line through the origin instead of clipping it at 0
            return xy / xx * kv_bytes
        return binding_s + slope * kv_bytes


@dataclass(frozen=True, slots=True)
class Staying:
    """Running means that predict when a sequence ends on its present worker."""

    tpot_s: float = 0.0
    """The duration of a decode step there; 0 before the first one."""
    mean_output_tokens: float = 0.0
    """Mean output length of answers that ended there; 0 before the first one."""

    def stepped(self, step_s: float) -> "Staying":
        """Return the state after one more decode step."""
        return Staying(_mean(self.tpot_s, step_s), self.mean_output_tokens)

    def ended(self, output_tokens: int) -> "Staying":
        """Return the state after one more answer that ended by itself."""
        return Staying(self.tpot_s, _mean(self.mean_output_tokens, output_tokens))

    def seconds(self, most_tokens_left: int) -> float:
        """Return the expected time until a sequence with at most this many tokens left ends.

        It is infinite before the first step.
        """
        tokens = expected_tokens_left(most_tokens_left, self.mean_output_tokens)
        return tokens * self.tpot_s if self.tpot_s else float("inf")


def expected_tokens_left(most: int, mean_output_tokens: float) -> float:
    """Return the expected number of output tokens to come, at most `most`.

    The tokens so far do not lower it: lengths are assumed to be memoryless, so a full mean always remains.
    """
    return min(most, mean_output_tokens) if mean_output_tokens else most


def sooner_handed_over(most_tokens_left: int, kv_bytes: int, staying: Staying, time: HandOverTime) -> bool:
    """Return whether a hand-over frees the worker of a sequence before the sequence's end would."""
    return time.seconds(kv_bytes) < staying.seconds(most_tokens_left)


def sooner_recomputed(most_tokens_left: int, recompute_s: float, waited_s: float, staying: Staying) -> bool:
    """Return whether to compute a sequence again elsewhere, in `recompute_s`, because its KV cannot move.

    A sequence that is expected to take longer than that goes at once. One that lasts longer than expected is given
    `recompute_s`, at most MAX_WAIT_S, so no wait is more than twice as long as necessary. One that is certain to end
    before that stays.
    """
    longest_s = most_tokens_left * staying.tpot_s
    if staying.tpot_s and longest_s <= min(recompute_s, MAX_WAIT_S):
        return False
    return staying.seconds(most_tokens_left) > recompute_s or waited_s >= min(recompute_s, MAX_WAIT_S)


_Sums = tuple[float, float, float, float, float]
"""Weighted sums of (1, x, y, x², x·y)."""


def _add(sums: _Sums, x: float, y: float, weight: float = 1.0) -> _Sums:
    count, of_x, of_y, of_xx, of_xy = sums
    return (
        count + weight,
        of_x + weight * x,
        of_y + weight * y,
        of_xx + weight * x * x,
        of_xy + weight * x * y,
    )


def _scaled(sums: _Sums, factor: float) -> _Sums:
    count, of_x, of_y, of_xx, of_xy = sums
    return count * factor, of_x * factor, of_y * factor, of_xx * factor, of_xy * factor


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value


class Leaving(Enum):
    CLOSED = "closed"
    WITHOUT_WEIGHTS = "without weights"
    """The engine's processes stay, so waking up reads only the weights."""
    WITH_WEIGHTS = "with weights"
    """The weights stay too, in host memory."""


def leave(size_bytes: int, *, host_bytes: int, sleeps: bool, drops_weights: bool) -> Leaving:
    """Return the most of a model with weights of this size that can stay.

    `host_bytes` is the host memory for all sleeping models.
    """
    if not sleeps or not host_bytes:
        return Leaving.CLOSED
    if size_bytes <= host_bytes:
        return Leaving.WITH_WEIGHTS
    return Leaving.WITHOUT_WEIGHTS if drops_weights else Leaving.CLOSED


def too_many(held: Sequence[int], wanted: int, most: int) -> int:
    """Return the number of held models to remove, longest unused first, so that `wanted` fits within `most`."""
    over, gone = sum(held) + wanted - most, 0
    while over > 0 and gone < len(held):
        over -= held[gone]
        gone += 1
    return gone
