"""Decide whether a worker takes a submitted sequence.

Faults that hold for every worker are checked before those of this worker's present state.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from libs.policy.roles import Assigned, Phase, Refusal
from libs.policy.worker import assignment as assignments


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
    """Whether the gateway held a credit for the sequence."""


def invalid(
    phase: int, model: str, adapter: str, *, worker_model: str, adapters: Collection[str] = (), loadable: bool = False
) -> Invalid | None:
    """Return the fault that makes a sequence invalid in every role of the worker, or None.

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
    code = assignments.refusal(worker.assignment, phase, draining=worker.draining)
    if code is not None:
        return code
    if kv_layout is not None and kv_layout != worker.kv_layout:
        return Refusal.KV_MISMATCH
    return None if worker.has_credit else Refusal.NO_CAPACITY
