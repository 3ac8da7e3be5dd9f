"""What the newest windows of all workers come to, added up as batches come: a window is then read as one array. Pure.

Only plain batches are added. Where others have a part in a worker's time, its windows must be cut from its timeline.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.telemetry.plain import PlainBatch
from libs.telemetry.steps import SHARE_BITS

WINDOW_NS: Final = 100_000_000
WINDOWS: Final = 16
"""That are held; what comes later than that is cut from timelines."""
MAX_AHEAD: Final = 5
"""Windows: a worker whose clock is further ahead is left out, so that it takes no room of the present."""
PARTS: Final = 4
"""Covered, prefill, decode, KV wait."""
NEVER: Final = (1 << 63) - 1


class Tally:
    """Sums by window and worker, exact from a moment on that is each worker's own."""

    def __init__(self, max_workers: int) -> None:
        # Arrays of the standard library are several times faster by item than numpy's, which look at the same memory.
        self._rows = [array("q", bytes(8 * PARTS * max_workers)) for _ in range(WINDOWS)]
        self._views: list[NDArray[np.int64]] = [np.frombuffer(row, np.int64).reshape(-1, PARTS) for row in self._rows]
        self._numbers = [-1] * WINDOWS
        """Of the window that a row holds."""
        self._exact_from = array("q", [NEVER]) * max_workers
        self._roles = bytearray(max_workers)
        self._places: dict[str, int] = {}
        self._free = list(range(max_workers - 1, -1, -1))

    def forget(self, worker_id: str) -> None:
        """Give its place to others."""
        place = self._places.pop(worker_id, None)
        if place is None:
            return
        for view in self._views:
            view[place] = 0
        self._exact_from[place] = NEVER
        self._free.append(place)

    def begin(self, worker_id: str, exact_from_ns: int, role: int) -> None:
        """From then on nothing is known of a worker yet: what comes is added, in a role that stays until the next
        `begin`."""
        place = self._places.get(worker_id)
        if place is None:
            place = self._places[worker_id] = self._free.pop()
        self._exact_from[place] = exact_from_ns
        self._roles[place] = role

    def add(self, worker_id: str, batch: PlainBatch, now_ns: int) -> bool:
        """Add a worker's next batch; False where there is no room for its time, and it must begin anew after it."""
        low_ns, high_ns, starts, ends, shares, _, waits = batch
        if high_ns > now_ns + MAX_AHEAD * WINDOW_NS:
            return False
        place = self._places[worker_id]
        first, index, count = PARTS * place, 0, len(starts)
        number = low_ns // WINDOW_NS
        while low_ns < high_ns:
            row = number % WINDOWS
            if self._numbers[row] != number and not self._open(row, number):
                return False
            number += 1
            edge_ns = number * WINDOW_NS
            busy_ns = prefill_ns = 0
            while index < count and starts[index] < edge_ns:
                start_ns, end_ns, share = starts[index], ends[index], shares[index]
                before_ns = low_ns - start_ns if low_ns > start_ns else 0
                until_ns = (end_ns if end_ns < edge_ns else edge_ns) - start_ns
                busy_ns += until_ns - before_ns
                # Rounded from where the step began, so that its parts in several windows add up to it.
                prefill_ns += (until_ns * share >> SHARE_BITS) - (before_ns * share >> SHARE_BITS)
                if end_ns > edge_ns:
                    break
                index += 1
            sums = self._rows[row]
            sums[first] += (high_ns if high_ns < edge_ns else edge_ns) - low_ns
            sums[first + 1] += prefill_ns
            sums[first + 2] += busy_ns - prefill_ns
            for start_ns, end_ns in waits:
                sums[first + 3] += max(min(end_ns, edge_ns) - max(start_ns, low_ns), 0)
            low_ns = edge_ns
        return True

    def read(
        self, start_ns: int, worker_ids: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
        """(times [workers, 4], roles [workers], exact [workers]) of the window that starts there; where it is not exact
        nothing is told."""
        places = np.array([self._places.get(worker_id, -1) for worker_id in worker_ids], np.int64)
        number = start_ns // WINDOW_NS
        row = number % WINDOWS
        exact = (np.frombuffer(self._exact_from, np.int64)[places] <= start_ns) & (places >= 0)
        if self._numbers[row] != number:
            exact[:] = False
        return self._views[row][places], np.frombuffer(self._roles, np.uint8)[places], exact

    def _open(self, row: int, number: int) -> bool:
        """Make room for a newer window."""
        if number < self._numbers[row]:
            return False
        self._numbers[row] = number
        self._views[row][:] = 0
        return True
