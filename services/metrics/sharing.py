"""Exchange of windows between instances of the metrics service, each of which reads a part of the telemetry.

Pure but for the bus that it publishes on and one warning.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import partial
from typing import Final

import numpy as np
import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    RequestEvent,
    SharedWindows,
    StepBatch,
)
from libs.contracts.roles import role_name
from libs.policy.reading import MAX_INSTANCES, Shares
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import MAX_FRESH, WrittenWindow
from libs.telemetry.rollups import (
    MAX_WORKERS,
    NO_ROLE,
    PROVISIONAL,
    ROLE_NUMBERS,
    Cells,
    RollUps,
    Series,
    Written,
)
from libs.telemetry.steps import PhaseTime
from services.metrics.shared_records import (
    Descriptions,
    Report,
    cells_of,
    cells_of_columns,
    column_messages,
    messages,
    shared_worker,
)

MAX_RESENT_WORKERS: Final = MAX_WORKERS
"""The maximum number of workers with unsent windows that are remembered; the windows of further workers are lost."""


class ResendWindow:
    """The time from which windows of some workers are sent again, with the contents of roll-ups at that moment.

    By then another instance may read those workers without their earlier telemetry.
    """

    def __init__(self) -> None:
        self._from_ns: int | None = None
        self._workers: set[str] = set()

    @property
    def workers(self) -> AbstractSet[str]:
        return self._workers

    def unsent(self, windows: Sequence[WrittenWindow]) -> None:
        """Record that these windows were not sent. None are sent until the next `take`."""
        starts = [window.start_ns for window in windows]
        if self._from_ns is not None:
            starts.append(self._from_ns)
        self._from_ns = min(starts, default=None)
        for name in (name for window in windows for name in window.workers.worker_ids):
            if len(self._workers) < MAX_RESENT_WORKERS:
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
    """Return each window with the workers that have data in it."""
    marked = series.roles | series.provisional * np.uint8(PROVISIONAL)
    encode = [None] * len(marked) if series.encode_ns is None else list(series.encode_ns)
    return [
        WrittenWindow(start_ns, Cells(series.worker_ids, times, roles, encode_ns).where(roles != NO_ROLE), revised=True)
        for start_ns, times, roles, encode_ns in zip(
            series.starts_ns.tolist(), series.times_ns, marked, encode, strict=True
        )
    ]


OVERDUE_NS: Final = 500_000_000
"""The time after a window's end by which a live instance has sent it."""


class OverdueWindows:
    """The writer of overdue windows as uncovered, which lowers coverage until a later report replaces them."""

    def __init__(self) -> None:
        self._to_ns = 0

    def write(self, fleet: FleetTelemetry, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Return the windows that have become overdue since the last call, at most `MAX_FRESH`."""
        length_ns = rollups.tiers[0].window_ns
        due_ns = now_ns - OVERDUE_NS
        due_ns -= due_ns % length_ns
        from_ns, self._to_ns = max(self._to_ns, due_ns - MAX_FRESH * length_ns), due_ns
        windows = (_write(fleet, rollups, start_ns, now_ns) for start_ns in range(from_ns, due_ns, length_ns))
        return [window for window in windows if window.workers]


def _write(fleet: FleetTelemetry, rollups: RollUps, start_ns: int, now_ns: int) -> WrittenWindow:
    length_ns = rollups.tiers[0].window_ns
    end_ns, known = start_ns + length_ns, set(rollups.worker_ids())
    silent = [facts for facts in fleet.directory.silent_elsewhere(end_ns, now_ns) if facts.worker_id in known]
    roles = rollups.read(length_ns, start_ns, end_ns, [facts.worker_id for facts in silent]).roles
    unreported = [facts for facts, role in zip(silent, roles[0].tolist(), strict=True) if role == NO_ROLE]
    written = [Written(each.worker_id, PhaseTime(), ROLE_NUMBERS[role_name(each.assignment)]) for each in unreported]
    return WrittenWindow(start_ns, rollups.write(start_ns, written, fuller=True), revised=True)


log = structlog.get_logger()

MAX_RECEIVED_CELLS: Final = 65_536
"""The bound on received windows, of one worker each, that wait for the stream's next tick. Further ones are in history
only.
"""
MAX_AGE_NS: Final = 2 * LISTED_NS
OLDER_NS: Final = 60_000_000_000
"""The time for which records are in the form of an older release after the last record of such an instance.

It may read on while the broker accepts nothing from it.
"""
MAX_APART_NS: Final = 5_000_000_000
"""Largest difference between clocks of instances.

An older record was read after an absence. Its windows count, but it says nothing about live instances or clocks. An
instance wrongly taken for alive for this long does no harm, as partitions are taken over from ten seconds back.
"""
MAX_UNSENT: Final = 32
"""The bound on records that may wait for the broker before sending stops. More records would displace alerts in the
bus's buffer.
"""


class LeftOut(StrEnum):
    """The reason for which part of a record is not accepted."""

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
        self._peers: dict[str, int] = {}
        """Each live instance's incarnation."""
        self._older: dict[str, int] = {}
        """The time of the last record of each instance that does not understand columns."""
        self._descriptions = Descriptions(began_ns)
        self._tells_all = True
        """True if the next record describes all workers: at the start, after an outage, and when an instance joins."""
        self._newest: dict[str, tuple[StepBatch, int]] = {}
        """The newest batch of each worker to report, with its time of arrival."""
        self._kept: list[WrittenWindow] = []
        """Windows written since the last record; at most those of a few rounds."""
        self._resend = ResendWindow()
        self._overdue = OverdueWindows()
        self._received: list[WrittenWindow] = []
        self._received_cells = 0
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
        """Publish the new windows of own workers, except long-silent ones, and earlier unsent windows of workers that
        were own then.

        The record also shows that this instance is alive.
        """
        windows, self._kept = self._kept, []
        away = self._unsent() > MAX_UNSENT
        if away:
            self._resend.unsent(windows)
        self._newest = {
            name: (batch, arrived_ns)
            for name, (batch, arrived_ns) in self._newest.items()
            if name in self._resend.workers or (fleet.directory.is_own(name) and arrived_ns > now_ns - LISTED_NS)
        }
        if away:
            self._tells_all = True
            return
        fleet.settle()
        for message in self._messages(fleet, [*windows, *self._resend.take(rollups, now_ns)], now_ns):
            message.metrics_id, message.incarnation = self.shares.own_id, self._began_ns
            message.told_unix_ns, message.reads_loads = now_ns, True
            self._publish(message)

    def _messages(
        self, fleet: FleetTelemetry, windows: Sequence[WrittenWindow], now_ns: int
    ) -> Iterator[SharedWindows]:
        newest = list(self._newest.items())[:MAX_WORKERS]
        alive = set(self.shares.alive(now_ns))
        self._peers = {name: peer for name, peer in self._peers.items() if name in alive}
        self._older = {
            name: received_ns for name, received_ns in self._older.items() if now_ns - received_ns < OLDER_NS
        }
        if self._older:
            self._tells_all = True
            return messages([shared_worker(*each, fleet) for _, each in newest], windows)
        before, timelines = self._descriptions.last, fleet.directory.timelines
        reports = [
            Report(name, batch, arrived_ns, self._descriptions.number(name, timelines.get(name)))
            for name, (batch, arrived_ns) in newest
        ]
        self._descriptions.forget_all_but(self._newest.keys())
        to_describe = self._descriptions.to_describe(reports, before, everybody=self._tells_all)
        self._tells_all = False
        return column_messages(reports, to_describe, windows, fleet)

    def hear(self, message: SharedWindows, now_ns: int, fleet: FleetTelemetry, rollups: RollUps, from_ns: int) -> None:
        """Process another instance's record with its windows from `from_ns` on.

        Where both instances read a worker, the window that covers more counts.
        """
        sent_ns = message.told_unix_ns
        if message.metrics_id == self.shares.own_id:
            self._hear_own_id(message)
            return
        fresh = abs(sent_ns - now_ns) < MAX_APART_NS
        if fresh:
            self.shares.mark_alive(message.metrics_id, now_ns)
            self._hear_peer(message, now_ns)
        from_ns = max(from_ns, now_ns - MAX_AGE_NS)
        if message.HasField("loads"):
            if not self._hear_columns(message, now_ns, fleet, ahead_ns=now_ns - sent_ns if fresh else None):
                return
            worker_ids = list(message.loads.worker_ids)
            for each in message.loads.windows:
                cells = partial(cells_of_columns, each, worker_ids, rollups.tiers[0].window_ns)
                self._hear_window(each.start_unix_ns, cells, now_ns, rollups, from_ns)
            return
        for worker in message.workers:
            # The arrival by this process's clock, from the age that the sender reports. The transit is not known.
            arrived_ns = now_ns - max(sent_ns - worker.arrived_unix_ns, 0)
            if not fleet.relay(worker, now_ns, arrived_ns if fresh else None, message.metrics_id):
                self.left_out[LeftOut.MALFORMED] += 1
        for window in message.windows:
            cells = partial(cells_of, window, message.workers, rollups.tiers[0].window_ns)
            self._hear_window(window.start_unix_ns, cells, now_ns, rollups, from_ns)

    def _hear_columns(
        self, message: SharedWindows, now_ns: int, fleet: FleetTelemetry, *, ahead_ns: int | None
    ) -> bool:
        """Enter a record's loads; return False if its columns are invalid, so that its windows cannot be trusted."""
        try:
            invalid = fleet.relay_columns(
                message.loads, message.workers, now_ns, ahead_ns=ahead_ns, reader=message.metrics_id
            )
        except ValueError:
            self.left_out[LeftOut.MALFORMED] += 1
            return False
        self.left_out[LeftOut.MALFORMED] += invalid
        return True

    def _hear_peer(self, message: SharedWindows, now_ns: int) -> None:
        name, known = message.metrics_id, self._peers.get(message.metrics_id)
        if known != message.incarnation and len(self._peers) < MAX_INSTANCES:
            self._tells_all = True
        if known is not None or len(self._peers) < MAX_INSTANCES:
            self._peers[name] = message.incarnation
        if message.reads_loads:
            self._older.pop(name, None)
        elif name in self._older or len(self._older) < MAX_INSTANCES:
            self._older[name] = now_ns

    def _hear_own_id(self, message: SharedWindows) -> None:
        # Records from before this instance's restart are not another instance's.
        if message.incarnation == self._began_ns or message.told_unix_ns < self._began_ns + MAX_APART_NS:
            return
        if not self.left_out[LeftOut.NAMESAKE]:
            log.warning("another metrics service has the same id, so the two ignore each other", id=self.shares.own_id)
        self.left_out[LeftOut.NAMESAKE] += 1

    def _hear_window(
        self, start_ns: int, cells: Callable[[], Cells], now_ns: int, rollups: RollUps, from_ns: int
    ) -> None:
        if start_ns < from_ns:
            self.left_out[LeftOut.PAST] += 1
            return
        if start_ns > now_ns + MAX_APART_NS:
            self.left_out[LeftOut.FUTURE] += 1
            return
        try:
            taken = rollups.enter(start_ns, cells(), fuller=True)
        except ValueError:
            self.left_out[LeftOut.MALFORMED] += 1
            return
        room = MAX_RECEIVED_CELLS - self._received_cells
        self.left_out[LeftOut.UNSTREAMED] += max(len(taken) - room, 0)
        if streamed := taken.first(room):
            self._received.append(WrittenWindow(start_ns, streamed, revised=True))
            self._received_cells += len(streamed)

    def take_received(self, fleet: FleetTelemetry, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Return windows received since the last call, and overdue windows that no instance reports any more."""
        received, self._received, self._received_cells = self._received, [], 0
        return received + self._overdue.write(fleet, rollups, now_ns)

    def makes_trace(self, event: RequestEvent, fleet: FleetTelemetry, now_ns: int) -> bool:
        """Return whether this instance exports the request's trace."""
        worker_id = event.decode_worker or event.prefill_worker
        if not worker_id:
            return self.shares.leads(now_ns)
        facts = fleet.directory.facts(worker_id)
        covered_to_ns = None if facts is None else facts.covered_to_unix_ns
        return self.shares.traces(own=fleet.directory.is_own(worker_id), covered_to_ns=covered_to_ns, now_ns=now_ns)
