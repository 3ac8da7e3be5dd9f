"""FLOPs and bytes of a worker's finished steps, for any window: 32 bytes a step."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import Step, StepBatch
from libs.perfmodel.utilisation import Compute, Effort, step_effort
from libs.perfmodel.wire import compute_of, step_work
from libs.telemetry.steps import FULL_SHARE

KINDS = 4
"""Prefill and decode FLOPs, prefill and decode bytes."""
MOST = 1e30
"""Of any of them in one step, whatever a worker says."""


def effort_of(batch: StepBatch) -> Callable[[Step, int], Effort] | None:
    """The effort of a batch's steps by their prefill share, 0..`FULL_SHARE`; None where the worker tells no shape."""
    compute: Compute | None = compute_of(batch.compute) if batch.HasField("compute") else None
    if compute is None:
        return None
    return lambda step, share: step_effort(compute, step_work(step), share / FULL_SHARE)


class EffortLog:
    """Steps by start. A step's effort is spread evenly over its time."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._amounts = array("f")
        """`KINDS` for each step."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int, effort: Effort) -> None:
        """Enter a step that ran [start, end); one that is known changes nothing."""
        index = bisect_left(self._starts, start)
        if end <= start or (index < len(self) and self._starts[index] == start):
            return
        told = (effort.prefill_flops, effort.decode_flops, effort.prefill_bytes, effort.decode_bytes)
        amounts = (min(amount, MOST) for amount in told)
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        self._amounts[index * KINDS : index * KINDS] = array("f", amounts)

    def within(self, low: int, high: int) -> Effort:
        """What was done in [low, high)."""
        first, last = max(bisect_right(self._starts, low) - 1, 0), bisect_left(self._starts, high)
        if first >= last:
            return Effort()
        starts, ends = np.array(self._starts[first:last]), np.array(self._ends[first:last])
        inside = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None)
        amounts: NDArray[np.float64] = np.array(self._amounts[first * KINDS : last * KINDS], np.float64)
        return Effort(*map(float, (inside / (ends - starts)) @ amounts.reshape(-1, KINDS)))

    def forget_before(self, point: int) -> None:
        """Drop steps that started before."""
        self._cut(slice(0, bisect_left(self._starts, point)))

    def forget_from(self, point: int) -> None:
        """Drop steps that started then or later."""
        self._cut(slice(bisect_left(self._starts, point), len(self)))

    def _cut(self, gone: slice) -> None:
        del self._starts[gone], self._ends[gone], self._amounts[gone.start * KINDS : gone.stop * KINDS]
