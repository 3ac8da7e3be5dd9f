"""Exchange of windows between instances of the metrics service, each of which reads a part of the telemetry.

Pure but for the bus that it publishes on and one warning.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent, SharedWindows, StepBatch
from libs.policy.metrics.shares import Shares
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.fleet import MAX_WORKERS, FleetTelemetry
from libs.telemetry.history import WrittenWindow
from libs.telemetry.windows.cells import Cells
from libs.telemetry.windows.rollups import RollUps
from services.metrics.sharing.again import Again
from services.metrics.sharing.overdue import Overdue
from services.metrics.sharing.wire import messages, shared_worker, written

log = structlog.get_logger()

MAX_HEARD: Final = 65_536
"""The most received windows, of one worker each, that wait for the stream's next tick. Further ones are in history
only.
"""
MAX_AGE_NS: Final = 2 * LISTED_NS
MAX_APART_NS: Final = 5_000_000_000
"""Largest difference between clocks of instances.

An older record was read after an absence. Its windows count, but it says nothing about live instances or clocks. An
instance wrongly taken for alive for this long does no harm, as partitions are taken over from ten seconds back.
"""
MAX_UNSENT: Final = 32
"""The most records that may wait for the broker before sending stops. Others could not read more, and it would push
alerts out of the bus's buffer.
"""


class LeftOut(StrEnum):
    """Reason for which a part of a record is not taken."""

    PAST = "past"
    """A window that is no longer kept, or that was restored from a file."""
    FUTURE = "future"
    """A window further ahead than clocks may differ."""
    MALFORMED = "malformed"
    """A window or a worker with impossible values."""
    UNSTREAMED = "unstreamed"
    """A worker's window that is in history but not in the stream."""
    NAMESAKE = "namesake"
    """A record of another instance of the same id."""


class Sharing:
    """The exchange between this instance's fleet and those of others."""

    def __init__(
        self,
        shares: Shares,
        publish: Callable[[SharedWindows], None],
        *,
        began_ns: int,
        unsent: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the exchange of a process begun at `began_ns`; `unsent` counts records that wait for the broker."""
        self.shares = shares
        self._publish = publish
        self._began_ns = began_ns
        self._unsent = unsent
        self._newest: dict[str, tuple[StepBatch, int]] = {}
        """The newest batch of each worker to report, with its time of arrival."""
        self._kept: list[WrittenWindow] = []
        """Windows written since the last record, of no more than a few rounds."""
        self._again = Again()
        self._overdue = Overdue()
        self._heard: list[WrittenWindow] = []
        self._heard_cells = 0
        self.left_out = Counter(dict.fromkeys(LeftOut, 0))

    def note(self, batch: StepBatch, now_ns: int) -> None:
        """Record a counted batch of a worker that this instance reads."""
        known = self._newest.get(batch.worker_id)
        if known is None or batch.covered_to_unix_ns >= known[0].covered_to_unix_ns:
            self._newest[batch.worker_id] = batch, now_ns

    def keep(self, windows: Sequence[WrittenWindow]) -> None:
        """Add windows of own workers to the next record."""
        self._kept += windows

    def send(self, fleet: FleetTelemetry, rollups: RollUps, now_ns: int) -> None:
        """Publish the new windows of own workers without those long silent, and earlier unsent windows of workers own
        then.

        The record also shows that this instance is alive.
        """
        windows, self._kept = self._kept, []
        away = self._unsent() > MAX_UNSENT
        if away:
            self._again.unsent(windows)
        self._newest = {
            name: (batch, arrived_ns)
            for name, (batch, arrived_ns) in self._newest.items()
            if name in self._again.workers or (fleet.directory.is_own(name) and arrived_ns > now_ns - LISTED_NS)
        }
        if away:
            return
        newest = list(self._newest.values())[:MAX_WORKERS]
        workers = [shared_worker(batch, arrived_ns, fleet) for batch, arrived_ns in newest]
        for message in messages(workers, [*windows, *self._again.take(rollups, now_ns)]):
            message.metrics_id, message.incarnation = self.shares.own_id, self._began_ns
            message.told_unix_ns = now_ns
            self._publish(message)

    def hear(self, message: SharedWindows, now_ns: int, fleet: FleetTelemetry, rollups: RollUps, from_ns: int) -> None:
        """Enter another instance's record with its windows from `from_ns` on.

        Where both instances read a worker, the window that covers more counts.
        """
        sent_ns = message.told_unix_ns
        if message.metrics_id == self.shares.own_id:
            self._hear_own_id(message)
            return
        fresh = abs(sent_ns - now_ns) < MAX_APART_NS
        if fresh:
            self.shares.hear(message.metrics_id, now_ns)
        for worker in message.workers:
            # On this process's clock, less the age that the sender reports; the transit is not known.
            arrived_ns = now_ns - max(sent_ns - worker.arrived_unix_ns, 0)
            if not fleet.relay(worker, now_ns, arrived_ns if fresh else None, message.metrics_id):
                self.left_out[LeftOut.MALFORMED] += 1
        self._hear_windows(message, now_ns, rollups, max(from_ns, now_ns - MAX_AGE_NS))

    def _hear_own_id(self, message: SharedWindows) -> None:
        # Its own records from before its restart are not another instance's.
        if message.incarnation == self._began_ns or message.told_unix_ns < self._began_ns + MAX_APART_NS:
            return
        if not self.left_out[LeftOut.NAMESAKE]:
            log.warning("another metrics service has the same id, and neither hears the other", id=self.shares.own_id)
        self.left_out[LeftOut.NAMESAKE] += 1

    def _hear_windows(self, message: SharedWindows, now_ns: int, rollups: RollUps, from_ns: int) -> None:
        length = rollups.tiers[0].window_ns
        for window in message.windows:
            start_ns = window.start_unix_ns
            if start_ns < from_ns:
                self.left_out[LeftOut.PAST] += 1
                continue
            if start_ns > now_ns + MAX_APART_NS:
                self.left_out[LeftOut.FUTURE] += 1
                continue
            try:
                workers = list(written(window, message.workers, length))
            except ValueError:
                self.left_out[LeftOut.MALFORMED] += 1
                continue
            self._hear_window(start_ns, rollups.write(start_ns, workers, fuller=True))

    def _hear_window(self, start_ns: int, taken: Cells) -> None:
        room = MAX_HEARD - self._heard_cells
        self.left_out[LeftOut.UNSTREAMED] += max(len(taken) - room, 0)
        if streamed := taken.first(room):
            self._heard.append(WrittenWindow(start_ns, streamed, revised=True))
            self._heard_cells += len(streamed)

    def take_heard(self, fleet: FleetTelemetry, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Return windows received since the last call, and those that no instance reports any more."""
        heard, self._heard, self._heard_cells = self._heard, [], 0
        return heard + self._overdue.write(fleet, rollups, now_ns)

    def makes_trace(self, event: RequestEvent, fleet: FleetTelemetry, now_ns: int) -> bool:
        """Report whether this instance makes the request's trace."""
        worker_id = event.decode_worker or event.prefill_worker
        if not worker_id:
            return self.shares.leads(now_ns)
        facts = fleet.directory.facts(worker_id)
        covered_to_ns = None if facts is None else facts.covered_to_unix_ns
        return self.shares.traces(own=fleet.directory.is_own(worker_id), covered_to_ns=covered_to_ns, now_ns=now_ns)
