"""Batches that simply go on where a worker's last one ended, as nearly all do: read once, entered as a whole. Pure."""

from array import array
from collections.abc import Callable
from operator import attrgetter, le, lt
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch, StepColumns
from libs.contracts.step_row import ENTRY_BYTES, whole_column
from libs.telemetry.steps import StepCounts

LONGEST_NS: Final = 1_000_000_000
"""Of a plain batch."""
# Attributes of protobuf's are read in C by this, several times faster than one by one.
_COUNTS: Final = attrgetter(*StepCounts._fields)


class PlainBatch(NamedTuple):
    """Covers [low, high) with steps and waits that lie within it, in order, and none of them over another."""

    low_ns: int
    high_ns: int
    starts_ns: list[int]
    ends_ns: list[int]
    shares: list[int]
    """Prefill parts of the steps, 0..`FULL_SHARE`."""
    counts: list[bytes]
    """A column for each of `StepCounts`."""
    waits_ns: list[tuple[int, int]]
    """When sequences awaited KV and no step ran."""


def plain_batch(
    batch: StepBatch, low_ns: int, high_ns: int, prefill_shares: Callable[[StepBatch], list[int]]
) -> PlainBatch | None:
    """A batch that covers [low, high); None wherever time must be sorted out first.

    Raises ValueError where columns of steps differ in length.
    """
    steps = batch.steps
    starts, ends = array("Q", steps.start_unix_ns).tolist(), array("Q", steps.end_unix_ns).tolist()
    shares: list[int] = []
    if starts:
        if not _in_order(starts, ends, low_ns, high_ns):
            return None
        shares = prefill_shares(batch)
    waits = _waits_beside(starts, ends, batch, low_ns, high_ns) if batch.kv_waits else []
    if waits is None:
        return None
    return PlainBatch(low_ns, high_ns, starts, ends, shares, step_counts(steps, len(starts)), waits)


def step_counts(steps: StepColumns, count: int) -> list[bytes]:
    """A column for each of `StepCounts`; raises ValueError where columns differ in length."""
    length = ENTRY_BYTES * count
    return [column if len(column) == length else whole_column(column, count) for column in _COUNTS(steps)]


def _waits_beside(
    starts: list[int], ends: list[int], batch: StepBatch, low_ns: int, high_ns: int
) -> list[tuple[int, int]] | None:
    """The batch's waits in order; None where they are not apart from one another and from its steps."""
    waits = [(wait.start_unix_ns, wait.end_unix_ns) for wait in batch.kv_waits]
    spans = sorted([*zip(starts, ends, strict=True), *waits])
    apart = _in_order([start for start, _ in spans], [end for _, end in spans], low_ns, high_ns)
    return sorted(waits) if apart else None


def _in_order(starts: list[int], ends: list[int], low_ns: int, high_ns: int) -> bool:
    """Whether spans, at least one, that are not empty follow one another within [low, high)."""
    if len(starts) != len(ends) or starts[0] < low_ns or ends[-1] > high_ns:
        return False
    return all(map(lt, starts, ends)) and all(map(le, ends, starts[1:]))
