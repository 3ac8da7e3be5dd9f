"""Step durations of workers relative to their peers, and the time per output token. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.perfmodel.reference import expected_ns
from libs.policy.step_time import StepTimeModel
from libs.telemetry.worker.steps import FinishedSteps, StepCounts

WINDOW_NS: Final = 2_000_000_000
LOOK_BACK_NS: Final = 3 * WINDOW_NS
"""The time from which the newest steps count if a window holds fewer than `LEAST_STEPS`; a step may take half a
second.
"""
LEAST_STEPS: Final = 3
LEAST_NS: Final = 150_000_000
"""The least time in steps, beside `LEAST_STEPS`, that says anything about a worker."""
LAST_STEPS: Final = 2
LAST_NS: Final = 400_000_000
"""The least time of the last steps together. If each of them took longer than usual, the worker has just become slow,
however fast it was before.
"""
_BATCH: Final = StepCounts._fields.index("decode_sequences")


@dataclass(frozen=True, slots=True)
class StepPace:
    """How slow one worker's steps are in a window."""

    slowness: float | None
    """Measured over expected duration; None for too few steps."""
    token_ns: float
    """Durations of steps that decode, each times its sequences, summed."""
    tokens: float
    """Sequences of the steps that decode, summed."""


NO_PACE: Final = StepPace(None, 0.0, 0.0)
LEAST_PEERS: Final = 3


def beside_peers(paces: Mapping[str, StepPace]) -> dict[str, float | None]:
    """Return each worker's slowness relative to the model's median worker.

    What slows all workers thus accuses none. The result is None for workers that ran too little, and for all of
    them if fewer than `LEAST_PEERS` ran enough.
    """
    known = sorted(each.slowness for each in paces.values() if each.slowness is not None)
    if len(known) < LEAST_PEERS:
        return dict.fromkeys(paces)
    middle = max(known[(len(known) - 1) // 2], 1e-9)
    return {name: None if each.slowness is None else each.slowness / middle for name, each in paces.items()}


def pace(steps: FinishedSteps, usual: StepTimeModel, now_ns: int) -> StepPace:
    """Measure the newest of the finished steps of `LOOK_BACK_NS` against the usual step-time model."""
    first = min(int(np.searchsorted(steps.ends_ns, now_ns - WINDOW_NS)), max(len(steps.ends_ns) - LEAST_STEPS, 0))
    took_ns = (steps.ends_ns - steps.starts_ns)[first:].astype(np.float64)
    if not len(took_ns):
        return NO_PACE
    counts = steps.counts[:, first:]
    batch = counts[_BATCH]
    expected = expected_ns(usual, counts)
    total_ns, whole_ns = float(took_ns.sum()), float(expected.sum())
    enough = len(took_ns) >= LEAST_STEPS and total_ns >= LEAST_NS and whole_ns > 0
    slowness = max(total_ns / whole_ns, _lately(took_ns, expected)) if enough else None
    return StepPace(slowness, float(took_ns @ batch), float(batch.sum()))


def _lately(took_ns: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the least slowness among the newest steps, so that a single stall accuses nobody; 0 if they are too
    short.
    """
    took, most = took_ns[-LAST_STEPS:], np.maximum(expected[-LAST_STEPS:], 1.0)
    return float((took / most).min()) if took.sum() >= LAST_NS else 0.0
