"""Batches that continue where their workers' last ones ended, processed many at a time as arrays. Pure.

Nearly all batches are of this kind. Ten thousand batches a second are too many to handle step by step, so they are
gathered and computed in arrays before anything is read.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import COLUMN_NAMES, ENTRY_BYTES, StepRow
from libs.telemetry.worker.steps import FULL_SHARE

LONGEST_NS: Final = 1_000_000_000
"""Longest cover of a batch that is gathered rather than entered by itself."""
START, END, PREFILL, DECODE = map(
    COLUMN_NAMES.index, ("start_unix_ns", "end_unix_ns", "prefill_tokens", "decode_sequences")
)
NO_END: Final = bytes(ENTRY_BYTES)
"""Entry in the column of ends of a step that is only announced."""
INT64_END: Final = 1 << 62
"""Exclusive bound on times and numbers from the wire."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PrefillShares = Callable[[StepBatch], list[int]]
"""A function that returns the prefill part of each step of a batch, 0..`FULL_SHARE`; it raises ValueError for
malformed steps.
"""
Followed = tuple[StepBatch, str, int, int, list[bytes], int]
"""A single batch with the fields of `StepBatchColumns` in order. It is a bare tuple, as millions are made."""


class StepBatchColumns(NamedTuple):
    """Gathered batches as columns, in order of arrival."""

    batches: Sequence[StepBatch]
    worker_ids: Sequence[str]
    lows_ns: Sequence[int]
    highs_ns: Sequence[int]
    """Ends of the covers, each [low, high)."""
    columns: Sequence[list[bytes]]
    """Packed columns of each batch's steps, in the order of `StepRow`."""
    arrived_ns: Sequence[int]

    @classmethod
    def of(cls, followed: Sequence[Followed]) -> Self:
        """Transpose a sequence of at least one batch."""
        return cls._make(zip(*followed, strict=True))


class Spans(NamedTuple):
    """Spans of time, each belonging to one of the batches."""

    of: Ints
    """Place of the batch that each span belongs to."""
    starts_ns: Ints
    ends_ns: Ints


class AlignedSteps(NamedTuple):
    """The covers, steps and KV waits of many batches as arrays."""

    covers: Spans
    """The cover of each batch, one per batch."""
    steps: Spans
    shares: Ints
    """Prefill parts of the steps, 0..`FULL_SHARE`."""
    waits: Spans
    """Times in which sequences awaited KV and no step ran."""
    ranges: list[tuple[int, int]]
    """The first and one past the last step of each batch."""
    plain: Bools
    """Whether each batch's steps and waits lie within its cover, in order, without overlap."""


def lay(gathered: StepBatchColumns, prefill_shares: Callable[[StepBatch], list[int]]) -> AlignedSteps:
    """Align the steps of all batches; shares of batches that are not plain are not filled in."""
    counts = np.array([len(columns[START]) for columns in gathered.columns], np.int64) // ENTRY_BYTES
    edges = [0, *np.cumsum(counts).tolist()]
    places = np.arange(len(counts))
    of = np.repeat(places, counts)

    def column(index: int) -> Ints:
        return np.frombuffer(b"".join([columns[index] for columns in gathered.columns]), np.int64)

    covers = Spans(places, np.array(gathered.lows_ns, np.int64), np.array(gathered.highs_ns, np.int64))
    steps, waits = Spans(of, column(START), column(END)), _waits(gathered.batches)
    plain = _apart(covers, steps, waits)
    has_prefill, has_decode = column(PREFILL) != 0, column(DECODE) != 0
    shares = np.where(has_prefill, FULL_SHARE, 0)
    for place in np.unique(of[has_prefill & has_decode]).tolist():
        try:
            shares[edges[place] : edges[place + 1]] = prefill_shares(gathered.batches[place])
        except ValueError:
            plain[place] = False
    return AlignedSteps(covers, steps, shares, waits, list(pairwise(edges)), plain)


def _waits(batches: Sequence[StepBatch]) -> Spans:
    waits = [
        (place, wait.start_unix_ns, wait.end_unix_ns)
        for place, batch in enumerate(batches)
        for wait in batch.kv_waits or ()
    ]
    # Values too large for an int64 wrap from uint64 to negative ones, which lie before any cover.
    return Spans(*np.array(waits, np.uint64).reshape(-1, 3).T.astype(np.int64))


def _apart(covers: Spans, steps: Spans, waits: Spans) -> Bools:
    plain = np.ones(len(covers.of), np.bool_)
    for spans in (steps, waits):
        inside = (covers.starts_ns[spans.of] <= spans.starts_ns) & (spans.ends_ns <= covers.ends_ns[spans.of])
        plain[spans.of[~(inside & (spans.starts_ns < spans.ends_ns))]] = False
    plain[_overlapping(steps)] = False
    if len(waits.of):
        both = Spans(*map(np.concatenate, zip(steps, waits, strict=True)))
        order = np.lexsort((both.starts_ns, both.of))
        plain[_overlapping(Spans(*(each[order] for each in both)))] = False
    return plain


def _overlapping(spans: Spans) -> Ints:
    """Return batches in which a span begins before the one before it has ended."""
    over = (spans.ends_ns[:-1] > spans.starts_ns[1:]) & (spans.of[:-1] == spans.of[1:])
    found: Ints = spans.of[:-1][over]
    return found


def well_formed(batch: StepBatch, steps: Iterable[tuple[StepRow, int]]) -> bool:
    """Report whether a batch's times and numbers, and those of its steps, lie within bounds."""
    ends = [(step.start_unix_ns, step.end_unix_ns or step.start_unix_ns) for step, _ in steps]
    ends += [(wait.start_unix_ns, wait.end_unix_ns) for wait in batch.kv_waits]
    ends.append((batch.covered_from_unix_ns, batch.covered_to_unix_ns))
    return (
        bool(batch.worker_id)
        and max(batch.sequence, batch.incarnation) < INT64_END
        and all(0 < start <= end < INT64_END for start, end in ends)
    )
