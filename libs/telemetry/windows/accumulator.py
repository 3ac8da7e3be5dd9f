"""Sums of the newest windows of all workers, updated as batches arrive. Pure.

A window is then read as one array. Only plain batches are added; where others touch a worker's time, its windows must
be cut from its timeline.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.telemetry.windows.cells import COVERED, DECODE, KV_WAIT, PREFILL
from libs.telemetry.worker.batch_columns import LONGEST_NS, AlignedSteps, Bools, Ints, Spans
from libs.telemetry.worker.steps import SHARE_BITS

WINDOW_NS: Final = 100_000_000
WINDOWS: Final = 16
"""Number of windows held; anything that comes later is cut from timelines."""
MAX_AHEAD: Final = 5
"""Number of windows that a worker's clock may be ahead. Batches further ahead are left out, so that they take no row
of the present.
"""
PARTS: Final = 4
MOST_WINDOWS: Final = LONGEST_NS // WINDOW_NS + 1
"""The most windows that a plain batch can touch."""
NEVER: Final = (1 << 63) - 1


class WindowAccumulator:
    """Sums by window and worker, each worker's exact from a moment of its own."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._sums = np.zeros((WINDOWS, max_workers, PARTS), np.int64)
        self._cells = self._sums.reshape(-1)
        self._numbers = np.full(WINDOWS, -1, np.int64)
        """Number of the window in each row; -1 for none yet."""
        self._exact_from = array("q", [NEVER]) * max_workers
        self._roles = bytearray(max_workers)
        self._places: dict[str, int] = {}
        self._free = list(range(max_workers - 1, -1, -1))

    def forget(self, worker_id: str) -> None:
        """Free the worker's place for another one."""
        place = self._places.pop(worker_id, None)
        if place is None:
            return
        self._sums[:, place] = 0
        self._exact_from[place] = NEVER
        self._free.append(place)

    def begin(self, worker_id: str, exact_from_ns: int, role: int) -> None:
        """Count a worker's time from `exact_from_ns` on, of which nothing is known yet; the role holds until the next
        `begin`.
        """
        place = self._places.get(worker_id)
        if place is None:
            place = self._places[worker_id] = self._free.pop()
        self._exact_from[place] = exact_from_ns
        self._roles[place] = role

    def add(self, worker_ids: Sequence[str], laid: AlignedSteps, arrived_ns: Ints) -> Bools:
        """Add the plain ones among workers' next batches, and return which were added.

        Batches of a clock that is too far ahead are left out too. A worker with a batch left out must `begin` again
        after it.
        """
        taken = laid.plain & (laid.covers.ends_ns <= arrived_ns + MAX_AHEAD * WINDOW_NS)
        cover, numbers, lows, highs = _by_window(laid.covers)
        self._open(numbers[taken[cover]])
        places = np.array([self._places[worker_id] for worker_id in worker_ids], np.int64)

        def put(part: int, batches: Ints, numbers: Ints, ns: Ints) -> None:
            rows = numbers % WINDOWS
            # Time older than its row is left out, as nobody reads it here.
            kept = taken[batches] & (self._numbers[rows] == numbers)
            cells = rows[kept] * self._max_workers + places[batches[kept]]
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
        places = np.array([self._places.get(worker_id, -1) for worker_id in worker_ids], np.int64)
        number = start_ns // WINDOW_NS
        row = number % WINDOWS
        exact = (np.frombuffer(self._exact_from, np.int64)[places] <= start_ns) & (places >= 0)
        times = self._sums[row][places]
        if self._numbers[row] < number:  # newer than any batch, so it is exactly empty
            times[:] = 0
        elif self._numbers[row] > number:
            exact[:] = False
        return times, np.frombuffer(self._roles, np.uint8)[places], exact

    def _open(self, numbers: Ints) -> None:
        """Reset rows for windows that are newer than what the rows hold, the newest first."""
        for number in np.unique(numbers)[::-1].tolist():
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
