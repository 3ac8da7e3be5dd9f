"""Windows that could not be told in their time: only of whom and from when on is remembered, since roll-ups hold them.
Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from libs.telemetry.cells import PROVISIONAL, Cells
from libs.telemetry.history import MAX_FRESH, WrittenWindow
from libs.telemetry.ring import NO_ROLE
from libs.telemetry.rollups import MAX_WORKERS, RollUps, Series

MAX_UNTOLD: Final = MAX_WORKERS
"""Workers of which something is remembered not to have been told; of further ones it is lost."""


class Again:
    """A place in time, from which on windows of some workers are told again as they are known by then: whoever reads
    those workers by then need not have read what was read of them here."""

    def __init__(self) -> None:
        self._from_ns: int | None = None
        self._workers: set[str] = set()

    @property
    def workers(self) -> AbstractSet[str]:
        """Of these something was not told."""
        return self._workers

    def untold(self, windows: Sequence[WrittenWindow]) -> None:
        """These were not told, nor will be those that follow before the next `take`."""
        starts = [window.start_ns for window in windows]
        if self._from_ns is not None:
            starts.append(self._from_ns)
        self._from_ns = min(starts, default=None)
        for name in (name for window in windows for name in window.workers.worker_ids):
            if len(self._workers) < MAX_UNTOLD:
                self._workers.add(name)

    def take(self, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """The next `MAX_FRESH` windows of those workers; such as are no longer kept are lost."""
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
    """Of each window the workers of which something was written."""
    marked = series.roles | series.provisional * np.uint8(PROVISIONAL)
    return [
        WrittenWindow(start_ns, Cells(series.worker_ids, times, roles).where(roles != NO_ROLE), revised=True)
        for start_ns, times, roles in zip(series.starts_ns.tolist(), series.times_ns, marked, strict=True)
    ]
