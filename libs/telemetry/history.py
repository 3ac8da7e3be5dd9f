"""The history of windows built from a fleet's telemetry. Time is passed in."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Final

from libs.telemetry.columns import Ints
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.rollups import Cells, RollUps
from libs.telemetry.workers import Listing, Members, member_of

MAX_REVISED: Final = 65_536
"""The bound on windows, of one worker each, that wait for revision. Windows beyond it are counted but not revised."""

MAX_FRESH: Final = 20
"""The bound on windows that one call writes for the first time. After a pause, the rest follows in later calls, since
one window takes 15 ms for 1,000 workers.
"""


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """A window of the first tier that has just been written."""

    start_ns: int
    workers: Cells
    revised: bool
    """True if the window was written before; `workers` then holds only those whose time changed."""


class History:
    """The writer that turns a fleet's telemetry into roll-ups, window by window."""

    def __init__(self, fleet: FleetTelemetry, rollups: RollUps, members: Members, *, shared: bool = False) -> None:
        """Attach to `fleet`. With `shared`, other processes write into the same roll-ups and know more of the time
        before a worker moved here.
        """
        self._shared = shared
        self._fleet = fleet
        fleet.on_change = self._note
        self._rollups = rollups
        self._members = members
        self._window_ns = rollups.tiers[0].window_ns
        self._kept_ns = self._window_ns * rollups.tiers[0].windows
        self._written_to_ns: int | None = None
        self._resumed_ns = 0
        self._listing: Listing | None = None
        """The listing that the members were last computed for."""
        self._filled_to_ns = 0
        """The end of the filled windows; those that begin earlier may hold more than the fleet does."""
        self._revised: dict[int, set[str]] = defaultdict(set)
        self._waiting = 0
        self.unrevised_windows = 0
        """The number of windows that late telemetry changed but that were not revised, because `MAX_REVISED` were
        waiting.
        """

    @property
    def written_to_ns(self) -> int | None:
        """The end of the newest written window; None before the first one."""
        return self._written_to_ns

    @property
    def resumed_ns(self) -> int:
        """The time before which windows are final; 0 if the history was not resumed."""
        return self._resumed_ns

    def resume(self, written_to_ns: int) -> None:
        """Continue at `written_to_ns`. Windows before it are complete in the roll-ups and are no longer revised."""
        self._written_to_ns = self._resumed_ns = written_to_ns

    @property
    def filled_ns(self) -> int:
        """The length of the windows that `fill` takes."""
        return self._rollups.tiers[1].window_ns

    def fill(self, start_ns: int, worker_ids: Sequence[str], known: FleetTelemetry) -> bool:
        """Copy workers' time in a window of the second tier from another fleet, if it covers no less than is known
        here.

        Return False for a window that is no longer kept. A window that is not written yet is left to `advance`.
        """
        end_ns = start_ns + self.filled_ns
        if self._written_to_ns is None or end_ns > self._written_to_ns:
            return True
        self._filled_to_ns = max(self._filled_to_ns, end_ns)
        starts = range(start_ns, end_ns, self._window_ns)
        return self._rollups.fill(
            start_ns, [known.cells(worker_ids, low_ns, low_ns + self._window_ns) for low_ns in starts]
        )

    def _note(self, worker_ids: Sequence[str], lows_ns: Ints, highs_ns: Ints) -> None:
        """Schedule the written windows that overlap each worker's changed time [low, high) for revision."""
        if self._written_to_ns is None:
            return
        low_ns = max(self._written_to_ns - self._kept_ns, self._resumed_ns, int(lows_ns.min()))
        high_ns = min(self._written_to_ns, int(highs_ns.max()))
        for start_ns in range(low_ns // self._window_ns * self._window_ns, high_ns, self._window_ns):
            touched = (lows_ns < start_ns + self._window_ns) & (highs_ns > max(start_ns, low_ns))
            if touched.any():
                self._revise(start_ns, compress(worker_ids, touched.tolist()))

    def _revise(self, start_ns: int, worker_ids: Iterable[str]) -> None:
        waiting, room = self._revised[start_ns], MAX_REVISED - self._waiting
        new = set(worker_ids).difference(waiting)
        self.unrevised_windows += max(len(new) - room, 0)
        waiting.update(islice(new, room))
        self._waiting += min(len(new), room)

    def advance(self, end_ns: int) -> list[WrittenWindow]:
        """Write all changed windows, and all that end by `end_ns`; return them, revised windows first."""
        self._fleet.settle()
        end_ns -= end_ns % self._window_ns
        written_to_ns = end_ns - self._window_ns if self._written_to_ns is None else self._written_to_ns
        revised, self._revised, self._waiting = self._revised, defaultdict(set), 0
        written = [self._write(start_ns, sorted(revised[start_ns]), revised=True) for start_ns in sorted(revised)]
        # After a pause, windows older than the tier reaches are skipped.
        from_ns = max(written_to_ns, end_ns - self._kept_ns)
        fresh = range(from_ns, min(end_ns, from_ns + MAX_FRESH * self._window_ns), self._window_ns)
        if fresh:
            listing = self._fleet.directory.listing(end_ns)
            if listing is not self._listing:
                self._members.enter(map(member_of, listing.workers))
                self._listing = listing
            written += [self._write(start_ns, listing.own_ids, revised=False) for start_ns in fresh]
        self._written_to_ns = max(written_to_ns, fresh.stop)
        return written

    def _write(self, start_ns: int, worker_ids: Sequence[str], *, revised: bool) -> WrittenWindow:
        known = self._fleet.cells(worker_ids, start_ns, start_ns + self._window_ns)
        fuller = self._shared or start_ns < self._filled_to_ns
        return WrittenWindow(start_ns, self._rollups.enter(start_ns, known, fuller=fuller), revised)
