"""Batches that continue where their workers' last ones ended, processed many at a time as arrays. Pure.

Nearly all batches are of this kind. Ten thousand a second are too many to handle step by step. They are gathered,
computed in arrays and summed into the newest windows before anything is read.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import compress, pairwise, repeat
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import PhaseEstimate, StepBatch
from libs.contracts.step_row import COLUMN_NAMES, ENTRY_BYTES, StepRow, step_count, step_rows
from libs.perfmodel.profiles import prior_step_time
from libs.perfmodel.wire import fitted_model, step_work
from libs.policy.step_time import StepTimeModel, split_step_ns
from libs.telemetry.pages import untouched_zeros
from libs.telemetry.rollups import COVERED, DECODE, KV_WAIT, PREFILL
from libs.telemetry.steps import FULL_SHARE, SHARE_BITS

LONGEST_NS: Final = 1_500_000_000
"""The longest cover of a batch that is gathered rather than entered by itself."""
START, END, PREFILL_TOKENS, DECODE_SEQUENCES, ENCODED_IMAGES = map(
    COLUMN_NAMES.index, ("start_unix_ns", "end_unix_ns", "prefill_tokens", "decode_sequences", "encoded_images")
)
NO_END: Final = bytes(ENTRY_BYTES)
"""The entry in the column of ends of a step that is only announced."""
UNREPORTED: Final = -1
"""The wait for a CPU of a worker that reports none."""
INT64_END: Final = 1 << 62
"""The exclusive bound on times and numbers from the wire."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PrefillShares = Callable[[StepBatch], list[int]]
"""A function that returns the prefill part of each step of a batch, 0..`FULL_SHARE`; it raises ValueError for
malformed steps.
"""
Followed = tuple[StepBatch, str, int, int, Sequence[bytes], int, str, bool, int]
"""A single batch with the fields of `StepBatchColumns` in order. It is a bare tuple, as millions are made."""


class StepBatchColumns(NamedTuple):
    """Gathered batches as columns, in order of arrival."""

    batches: Sequence[StepBatch]
    worker_ids: Sequence[str]
    lows_ns: Sequence[int]
    highs_ns: Sequence[int]
    """Ends of the covers, each [low, high)."""
    columns: Sequence[Sequence[bytes]]
    """Packed columns of each batch's steps, in the order of `StepRow`; one of zeros may be empty."""
    arrived_ns: Sequence[int]
    nodes: Sequence[str]
    fuller: Sequence[bool]
    """False for batches with nothing but steps, loads and waits for a CPU. Asking each part of them costs as much as
    their steps.
    """
    cpu_waited_ns: Sequence[int]
    """The time that each worker waited for a CPU; `UNREPORTED` without a report."""

    @classmethod
    def of(cls, followed: Sequence[Followed]) -> Self:
        """Transpose a sequence of at least one batch."""
        return cls._make(zip(*followed, strict=True))


class Spans(NamedTuple):
    """Spans of time, each belonging to one of the batches."""

    of: Ints
    """The index of the batch that each span belongs to."""
    starts_ns: Ints
    ends_ns: Ints


class AlignedSteps(NamedTuple):
    """The covers, steps and KV waits of many batches as arrays."""

    covers: Spans
    """The time that each batch covers."""
    steps: Spans
    shares: Ints
    """The prefill part of each step, 0..`FULL_SHARE`."""
    waits: Spans
    """The spans in which sequences awaited KV and no step ran."""
    ranges: list[tuple[int, int]]
    """The first step of each batch and one past its last."""
    plain: Bools
    """True if each batch's steps and waits lie within its cover, in order, without overlap."""


def lay(gathered: StepBatchColumns, prefill_shares: Callable[[StepBatch], list[int]]) -> AlignedSteps:
    """Align the steps of all batches; shares of batches that are not plain are not filled in."""
    counts = np.array([len(columns[START]) for columns in gathered.columns], np.int64) // ENTRY_BYTES
    edges = [0, *np.cumsum(counts).tolist()]
    indices = np.arange(len(counts))
    of = np.repeat(indices, counts)

    def column(index: int) -> Ints:
        return side_by_side([columns[index] for columns in gathered.columns], counts)

    covers = Spans(indices, np.array(gathered.lows_ns, np.int64), np.array(gathered.highs_ns, np.int64))
    fuller = list(compress(enumerate(gathered.batches), gathered.fuller))
    steps, waits = Spans(of, column(START), column(END)), _waits(fuller)
    plain = _apart(covers, steps, waits)
    has_prefill, has_decode = column(PREFILL_TOKENS) != 0, column(DECODE_SEQUENCES) != 0
    if any(columns[ENCODED_IMAGES] for columns in gathered.columns):
        has_prefill |= column(ENCODED_IMAGES) != 0
    shares = np.where(has_prefill, FULL_SHARE, 0)
    mixed = set(of[has_prefill & has_decode].tolist())
    mixed.update(index for index, batch in fuller if batch.HasField("estimate"))
    for index in sorted(mixed):
        try:
            shares[edges[index] : edges[index + 1]] = prefill_shares(gathered.batches[index])
        except ValueError:
            plain[index] = False
    return AlignedSteps(covers, steps, shares, waits, list(pairwise(edges)), plain)


def side_by_side(parts: Sequence[bytes], counts: Ints) -> Ints:
    """Join the parts of a column, of `counts` entries each; an empty part stands for zeros."""
    known = np.frombuffer(b"".join(parts), np.int64)
    whole = int(counts.sum())
    if len(known) == whole:  # the usual case
        return known
    filled = np.zeros(whole, np.int64)
    if len(known):
        filled[np.repeat(np.fromiter(map(bool, parts), np.bool_, len(parts)), counts)] = known
    return filled


MAX_ENGINES: Final = 32
"""The maximum number of engine names whose nearest profile is cached. A lookup costs more than entering a batch."""


def prefill_shares(batch: StepBatch) -> list[int]:
    """Return the prefill part of each of a batch's steps in units of 1/`FULL_SHARE`; pure steps are all or nothing.

    Mixed steps are split by the model that the worker has learned and reports. Only the ratio of prefill to decode
    cost matters here, so the nearest profile serves for a worker that reports none. Raise ValueError if the steps'
    columns differ in length.
    """
    steps = batch.steps
    if batch.HasField("estimate"):
        return [_estimated_share(batch.estimate)] * step_count(steps)
    if not (steps.prefill_tokens or steps.encoded_images):
        return [0] * step_count(steps)
    if not (steps.decode_sequences or steps.encoded_images):
        return [FULL_SHARE if tokens else 0 for tokens in array("Q", steps.prefill_tokens)]
    rows = step_rows(steps)
    # Most batches have no mixed step, and reading the model costs more than entering all of a batch's steps.
    mixed = any(row.prefill_tokens and row.decode_sequences for row in rows)
    model = _model(batch) if mixed else None
    return [_share(model, row) for row in rows]


def _estimated_share(estimate: PhaseEstimate) -> int:
    return min(estimate.prefill_ns * FULL_SHARE // max(estimate.busy_ns, 1), FULL_SHARE)


def _share(model: StepTimeModel | None, row: StepRow) -> int:
    if model is None or not (row.prefill_tokens and row.decode_sequences):
        return FULL_SHARE if row.prefill_tokens or row.encoded_images else 0
    return min(max(split_step_ns(model, step_work(row), FULL_SHARE)[0], 0), FULL_SHARE)


def _model(batch: StepBatch) -> StepTimeModel:
    fitted = fitted_model(batch.step_time) if batch.HasField("step_time") else None
    return fitted.model if fitted else _prior(batch.engine)


@lru_cache(maxsize=MAX_ENGINES)
def _prior(engine: str) -> StepTimeModel:
    return prior_step_time(engine)


def _waits(batches: Iterable[tuple[int, StepBatch]]) -> Spans:
    """Return the KV waits of batches given with their indices."""
    waits = [(index, wait.start_unix_ns, wait.end_unix_ns) for index, batch in batches for wait in batch.kv_waits]
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
    """Return whether a batch's times and numbers, and those of its steps, lie within bounds."""
    ends = [(step.start_unix_ns, step.end_unix_ns or step.start_unix_ns) for step, _ in steps]
    ends += [(wait.start_unix_ns, wait.end_unix_ns) for wait in batch.kv_waits]
    ends.append((batch.covered_from_unix_ns, batch.covered_to_unix_ns))
    return (
        bool(batch.worker_id)
        and max(batch.sequence, batch.incarnation) < INT64_END
        and all(0 < start <= end < INT64_END for start, end in ends)
    )


WINDOW_NS: Final = 100_000_000
WINDOWS: Final = 16
"""The number of windows held; later ones are cut from timelines."""
MAX_AHEAD: Final = 5
"""The number of windows that a worker's clock may be ahead. Batches further ahead are left out, so that they do not
displace a current row.
"""
PARTS: Final = 4
MOST_WINDOWS: Final = LONGEST_NS // WINDOW_NS + 1
"""The maximum number of windows that a plain batch can touch."""
NEVER: Final = (1 << 63) - 1


class WindowAccumulator:
    """Sums by window and worker. Each worker's sums are exact from its own start time on."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._sums: Ints = untouched_zeros((WINDOWS, max_workers, PARTS), np.int64)
        self._cells = self._sums.reshape(-1)
        self._numbers = np.full(WINDOWS, -1, np.int64)
        """The number of the window in each row; -1 for none yet."""
        self._exact_from = array("q", [NEVER]) * max_workers
        self._roles = bytearray(max_workers)
        self._index_of: dict[str, int] = {}
        self._free = list(range(max_workers - 1, -1, -1))

    def forget(self, worker_id: str) -> None:
        """Free the worker's index for another one."""
        index = self._index_of.pop(worker_id, None)
        if index is None:
            return
        self._sums[:, index] = 0
        self._exact_from[index] = NEVER
        self._free.append(index)

    def begin(self, worker_id: str, exact_from_ns: int, role: int) -> None:
        """Count a worker's time from `exact_from_ns` on, with nothing known yet; the role holds until the next
        `begin`.
        """
        index = self._index_of.get(worker_id)
        if index is None:
            index = self._index_of[worker_id] = self._free.pop()
        self._exact_from[index] = exact_from_ns
        self._roles[index] = role

    def add(self, worker_ids: Sequence[str], laid: AlignedSteps, arrived_ns: Ints) -> Bools:
        """Add the plain ones among workers' next batches, and return which were added.

        Batches of a clock that is too far ahead are left out too. A worker with a batch left out must `begin` again
        after it.
        """
        taken = laid.plain & (laid.covers.ends_ns <= arrived_ns + MAX_AHEAD * WINDOW_NS)
        cover, numbers, lows, highs = _by_window(laid.covers)
        self._open(numbers[taken[cover]])
        indices = np.fromiter(map(self._index_of.__getitem__, worker_ids), np.int64, len(worker_ids))

        def put(part: int, batches: Ints, numbers: Ints, ns: Ints) -> None:
            rows = numbers % WINDOWS
            # Time older than its row is left out, since it is never read here.
            kept = taken[batches] & (self._numbers[rows] == numbers)
            cells = rows[kept] * self._max_workers + indices[batches[kept]]
            np.add.at(self._cells, cells * PARTS + part, ns[kept])

        put(COVERED, cover, numbers, highs - lows)
        step, numbers, lows, highs = _by_window(laid.steps)
        starts, shares, batches = laid.steps.starts_ns[step], laid.shares[step], laid.steps.of[step]
        # Rounded relative to the step's start, so that its parts in several windows add up to the whole.
        prefill_ns = ((highs - starts) * shares >> SHARE_BITS) - ((lows - starts) * shares >> SHARE_BITS)
        put(PREFILL, batches, numbers, prefill_ns)
        put(DECODE, batches, numbers, highs - lows - prefill_ns)
        wait, numbers, lows, highs = _by_window(laid.waits)
        put(KV_WAIT, laid.waits.of[wait], numbers, highs - lows)
        return taken

    def read(
        self, start_ns: int, worker_ids: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
        """Return (times [workers, 4], roles [workers], exact [workers]) of the window that starts at `start_ns`.

        Times and roles are meaningless where `exact` is False.
        """
        indices = np.fromiter(map(self._index_of.get, worker_ids, repeat(-1)), np.int64, len(worker_ids))
        number = start_ns // WINDOW_NS
        row = number % WINDOWS
        exact = (np.frombuffer(self._exact_from, np.int64)[indices] <= start_ns) & (indices >= 0)
        times = self._sums[row][indices]
        if self._numbers[row] < number:  # newer than any batch, so it is exactly empty
            times[:] = 0
        elif self._numbers[row] > number:
            exact[:] = False
        return times, np.frombuffer(self._roles, np.uint8)[indices], exact

    def _open(self, numbers: Ints) -> None:
        """Reset rows for windows that are newer than what the rows hold, the newest first."""
        for number in sorted(set(numbers.tolist()), reverse=True):
            row = number % WINDOWS
            if number > self._numbers[row]:
                self._numbers[row] = number
                self._sums[row] = 0


def _by_window(spans: Spans) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (span, window number, from ns, to ns) of the part of each span in each window that it touches."""
    starts, ends = spans.starts_ns, spans.ends_ns
    first = starts // WINDOW_NS
    counts = np.where(ends > starts, (ends - 1) // WINDOW_NS - first + 1, 0)
    # Spans of batches that are not plain may have any length; they are dropped later.
    counts = np.minimum(counts, MOST_WINDOWS)
    span = np.repeat(np.arange(len(starts)), counts)
    numbers = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
    lows = np.maximum(starts[span], numbers * WINDOW_NS)
    highs = np.minimum(ends[span], (numbers + 1) * WINDOW_NS)
    return span, numbers, lows, highs
