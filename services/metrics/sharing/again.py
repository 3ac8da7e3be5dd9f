"""Bookkeeping of windows that could not be sent in time. Pure.

Only their workers and their start are kept, since roll-ups hold the rest.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from libs.telemetry.history import MAX_FRESH, WrittenWindow
from libs.telemetry.windows.cells import PROVISIONAL, Cells
from libs.telemetry.windows.ring import NO_ROLE
from libs.telemetry.windows.rollups import MAX_WORKERS, RollUps, Series

MAX_UNSENT: Final = MAX_WORKERS
"""The most workers with unsent windows that are remembered; those of further workers are lost."""


class Again:
    """The time from which some workers' windows are sent again, as roll-ups then hold them.

    By then another instance may read those workers, without their earlier telemetry.
    """

    def __init__(self) -> None:
        self._from_ns: int | None = None
        self._workers: set[str] = set()

    @property
    def workers(self) -> AbstractSet[str]:
        return self._workers

    def unsent(self, windows: Sequence[WrittenWindow]) -> None:
        """Record that these windows were not sent, nor any until the next `take`."""
        starts = [window.start_ns for window in windows]
        if self._from_ns is not None:
            starts.append(self._from_ns)
        self._from_ns = min(starts, default=None)
        for name in (name for window in windows for name in window.workers.worker_ids):
            if len(self._workers) < MAX_UNSENT:
                self._workers.add(name)

    def take(self, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Return the next `MAX_FRESH` windows of those workers; windows that are no longer kept are lost."""
        if self._from_ns is None:
            return []
        tier = rollups.tiers[0]
        newest_ns = now_ns - now_ns % tier.window_ns
        from_ns = max(self._from_ns, newest_ns - tier.window_ns * tier.windows)
        to_ns = min(from_ns + MAX_FRESH * tier.window_ns, newest_ns)
        known = [name for name in rollups.worker_ids() if name in self._workers]
        windows = _windows(rollups.read(tier.window_ns, from_ns, to_ns, known))
        self._from_ns = to_ns
        if to_ns == newest_ns:
            self._from_ns, self._workers = None, set()
        return windows


def _windows(series: Series) -> list[WrittenWindow]:
    """Return each window with the workers that have something written in it."""
    marked = series.roles | series.provisional * np.uint8(PROVISIONAL)
    return [
        WrittenWindow(start_ns, Cells(series.worker_ids, times, roles).where(roles != NO_ROLE), revised=True)
        for start_ns, times, roles in zip(series.starts_ns.tolist(), series.times_ns, marked, strict=True)
    ]
