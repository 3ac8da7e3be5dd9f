"""Keeps roll-ups true to the fleet: a window is written when its time has come, and again when something late changes
it. Pure; time is passed in."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Final

from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.listing import Listing
from libs.telemetry.members import Members, member_of
from libs.telemetry.windows.cells import Cells
from libs.telemetry.windows.rollups import RollUps
from libs.telemetry.worker.batch_columns import Ints

MAX_REVISED: Final = 65_536
"""Windows waiting to be written again, of one worker each; further ones keep what they had, which is counted."""

MAX_FRESH: Final = 20
"""Windows that one call writes for the first time: after a pause they are caught up with call by call, since each
takes 15 ms for 1,000 workers."""


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """A window of the first tier that has just been written."""

    start_ns: int
    workers: Cells
    revised: bool
    """Written before; `workers` are those of which something else is known now."""


class History:
    """Follows a fleet, window by window."""

    def __init__(self, fleet: FleetTelemetry, rollups: RollUps, members: Members, *, shared: bool = False) -> None:
        """`shared`: others write into the same roll-ups, and know more of the time before a worker came here."""
        self._shared = shared
        self._fleet = fleet
        fleet.tell_changes = self._note
        self._rollups = rollups
        self._members = members
        self._window_ns = rollups.tiers[0].window_ns
        self._kept_ns = self._window_ns * rollups.tiers[0].windows
        self._written_to_ns: int | None = None
        self._resumed_ns = 0
        self._listing: Listing | None = None
        """The listing that the members were last computed for."""
        self._filled_to_ns = 0
        """Windows that begin before may hold more than the fleet knows."""
        self._revised: dict[int, set[str]] = defaultdict(set)
        self._waiting = 0
        self.unrevised_windows = 0
        """Changed by late telemetry and left as they were, for want of room to note it."""

    @property
    def written_to_ns(self) -> int | None:
        """The end of the newest window; None before the first."""
        return self._written_to_ns

    @property
    def resumed_ns(self) -> int:
        """Before that nothing is written any more; 0 where it began anew."""
        return self._resumed_ns

    def resume(self, written_to_ns: int) -> None:
        """Go on from there: what came before is in the roll-ups already, whole, and is not revised any more."""
        self._written_to_ns = self._resumed_ns = written_to_ns

    @property
    def filled_ns(self) -> int:
        """How long a window is that `fill` takes."""
        return self._rollups.tiers[1].window_ns

    def fill(self, start_ns: int, worker_ids: Sequence[str], known: FleetTelemetry) -> bool:
        """Take what another fleet knows of workers in a window of the second tier, as far as it covers no less than
        what is known here. False for one that is no longer kept; one that is not written yet is left to `advance`."""
        end_ns = start_ns + self.filled_ns
        if self._written_to_ns is None or end_ns > self._written_to_ns:
            return True
        self._filled_to_ns = max(self._filled_to_ns, end_ns)
        starts = range(start_ns, end_ns, self._window_ns)
        return self._rollups.fill(
            start_ns, [known.cells(worker_ids, low_ns, low_ns + self._window_ns) for low_ns in starts]
        )

    def _note(self, worker_ids: Sequence[str], lows_ns: Ints, highs_ns: Ints) -> None:
        """Something else is known of what they did in [low, high): windows written before are written again."""
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
        """Write what has changed, and all windows that end by `end_ns`; what was written, revised windows first."""
        self._fleet.settle()
        end_ns -= end_ns % self._window_ns
        written_to_ns = end_ns - self._window_ns if self._written_to_ns is None else self._written_to_ns
        revised, self._revised, self._waiting = self._revised, defaultdict(set), 0
        written = [self._write(start_ns, sorted(revised[start_ns]), revised=True) for start_ns in sorted(revised)]
        # After a pause only what is kept is worth writing.
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
