"""Batches that simply go on where a worker's last one ended, as nearly all do: read once, entered as a whole. Pure."""

from array import array
from collections.abc import Callable
from operator import le, lt
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import whole_columns
from libs.telemetry.steps import COUNTS

LONGEST_NS: Final = 1_000_000_000
"""Of a plain batch."""


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

    Raises ValueError for steps that are malformed.
    """
    columns = whole_columns(batch.steps)
    starts: list[int] = []
    ends: list[int] = []
    shares: list[int] = []
    if columns[0]:
        starts, ends = array("Q", columns[0]).tolist(), array("Q", columns[1]).tolist()
        if not _in_order(starts, ends, low_ns, high_ns):
            return None
        shares = prefill_shares(batch)
    waits = _waits_beside(starts, ends, batch, low_ns, high_ns) if batch.kv_waits else []
    if waits is None:
        return None
    return PlainBatch(low_ns, high_ns, starts, ends, shares, columns[COUNTS], waits)


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
    inside = low_ns <= starts[0] and ends[-1] <= high_ns
    return inside and all(map(lt, starts, ends)) and all(map(le, ends, starts[1:]))
