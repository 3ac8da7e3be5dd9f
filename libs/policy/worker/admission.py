"""Whether a worker takes a submitted sequence: first what no worker would take, then what this one does not take now.
Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from libs.policy.roles import Assigned, Phase, Refusal
from libs.policy.worker import assignment as assignments


class Invalid(Enum):
    """Why a sequence is refused with Refusal.INVALID, as far as it shows before its tokens are read."""

    PHASE_MISSING = auto()
    OTHER_MODEL = auto()
    ADAPTER = auto()


@dataclass(frozen=True, slots=True)
class WorkerReadiness:
    """What a worker can take now."""

    assignment: Assigned
    draining: bool
    kv_layout: str
    """Of its engine's blocks."""
    has_credit: bool
    """Whether the gateway held a credit for the sequence."""


def invalid(
    phase: int, model: str, adapter: str, *, worker_model: str, adapters: Collection[str] = (), loadable: bool = False
) -> Invalid | None:
    """What is wrong with a sequence whichever role the worker has, or None.

    `adapters`: those that the worker was started with. `loadable`: it can load the sequence's adapter.
    """
    if phase not in (Phase.PREFILL, Phase.DECODE, Phase.BOTH):
        return Invalid.PHASE_MISSING
    if model != worker_model:
        return Invalid.OTHER_MODEL
    return Invalid.ADAPTER if adapter and adapter not in adapters and not loadable else None


def refusal(phase: int, kv_layout: str | None, worker: WorkerReadiness) -> Refusal | None:
    """Why the worker does not take a valid sequence now, or None. kv_layout: of the blocks it comes with, if any."""
    code = assignments.refusal(worker.assignment, phase, draining=worker.draining)
    if code is not None:
        return code
    if kv_layout is not None and kv_layout != worker.kv_layout:
        return Refusal.KV_MISMATCH
    return None if worker.has_credit else Refusal.NO_CAPACITY
