"""Batches that simply go on where a worker's last one ended, as nearly all do: read once, entered as a whole. Pure."""

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, le, lt
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import Step, StepBatch
from libs.telemetry.steps import FULL_SHARE, MAX_COUNT

LONGEST_NS: Final = 1_000_000_000
"""Of a plain batch."""
# Attributes of protobuf's are read in C by these, several times faster than one by one.
_COVER: Final = attrgetter("covered_from_unix_ns", "covered_to_unix_ns", "steps", "kv_waits")
_TIMES: Final = attrgetter("start_unix_ns", "end_unix_ns")
_COUNTS: Final = attrgetter("prefill_tokens", "prefill_sequences", "decode_sequences", "decode_kv_tokens")


class PlainBatch(NamedTuple):
    """Covers [low, high) with steps and waits that lie within it, in order, and none of them over another."""

    low_ns: int
    high_ns: int
    starts_ns: list[int]
    ends_ns: list[int]
    shares: list[int]
    """Prefill parts of the steps, 0..`FULL_SHARE`."""
    counts: list[int]
    """`StepCounts` of each step, side by side."""
    waits_ns: list[tuple[int, int]]
    """When sequences awaited KV and no step ran."""


def plain_batch(batch: StepBatch, known_to_ns: int, share: Callable[[Step], int]) -> PlainBatch | None:
    """None for one that tells of anything before `known_to_ns`, and wherever time must be sorted out first."""
    low_ns, high_ns, told, told_waits = _COVER(batch)
    if not known_to_ns <= low_ns <= high_ns <= low_ns + LONGEST_NS:
        return None
    starts: list[int] = []
    ends: list[int] = []
    shares: list[int] = []
    counts: list[int] = []
    steps = told[:]
    if steps:
        starts, ends = map(list, zip(*map(_TIMES, steps), strict=True))
        if not _in_order(starts, ends, low_ns, high_ns):
            return None
        shares = list(map(share, steps))
        counts = list(chain.from_iterable(map(_COUNTS, steps)))
        if min(shares) < 0 or max(shares) > FULL_SHARE:
            shares = [min(max(share, 0), FULL_SHARE) for share in shares]
        if max(counts) > MAX_COUNT:
            counts = [min(count, MAX_COUNT) for count in counts]
    waits = _waits_beside(starts, ends, batch, low_ns, high_ns) if told_waits else []
    return None if waits is None else PlainBatch(low_ns, high_ns, starts, ends, shares, counts, waits)


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
