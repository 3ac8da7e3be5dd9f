"""One of several instances: tells the others what it makes of its part, and takes what they make of theirs. Pure, but
for the bus that it is given to tell by, and one warning."""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent, SharedWindows, StepBatch
from libs.policy.metrics.shares import Shares
from libs.telemetry.cells import Cells
from libs.telemetry.fleet import MAX_WORKERS, Fleet
from libs.telemetry.history import WrittenWindow
from libs.telemetry.roll import LISTED_NS
from libs.telemetry.rollups import RollUps
from services.metrics.sharing.again import Again
from services.metrics.sharing.overdue import Overdue
from services.metrics.sharing.wire import messages, shared_worker, written

log = structlog.get_logger()

MAX_HEARD: Final = 65_536
"""Windows of one worker each that wait for the stream's next tick; what is beyond is in history only."""
MAX_AGE_NS: Final = 2 * LISTED_NS
MAX_APART_NS: Final = 5_000_000_000
"""That clocks of instances may differ. What was told so long ago is read after an absence: it tells of windows, and not
of who lives, nor of anybody's clock. Who is wrongly taken for alive for no longer than this costs nothing: partitions
are taken over from ten seconds back."""
MAX_UNSENT: Final = 32
"""Records that the broker has not taken. With more nothing is told: others could not hear it, and it would drive alerts
out of the bus's buffer."""


class LeftOut(StrEnum):
    """Why something that was told is not taken."""

    PAST = "past"
    """A window that is no longer kept, or that came back from a file."""
    FUTURE = "future"
    """A window further ahead than clocks may differ."""
    MALFORMED = "malformed"
    """A window or a worker that cannot be."""
    UNSTREAMED = "unstreamed"
    """A worker's window that is in history, and not in the stream."""
    NAMESAKE = "namesake"
    """A record of another instance of the same id."""


class Sharing:
    """Between the own fleet and the others'."""

    def __init__(
        self,
        shares: Shares,
        publish: Callable[[SharedWindows], None],
        *,
        began_ns: int,
        unsent: Callable[[], int] = lambda: 0,
    ) -> None:
        """`began_ns`: when this process did; `unsent` records wait to be taken by the broker."""
        self.shares = shares
        self._publish = publish
        self._began_ns = began_ns
        self._unsent = unsent
        self._newest: dict[str, tuple[StepBatch, int]] = {}
        """Of workers that something is to be told of, and when it came."""
        self._kept: list[WrittenWindow] = []
        """Written since something was told: of no more than a few rounds."""
        self._again = Again()
        self._overdue = Overdue()
        self._heard: list[WrittenWindow] = []
        self._heard_cells = 0
        self.left_out = Counter(dict.fromkeys(LeftOut, 0))

    def note(self, batch: StepBatch, now_ns: int) -> None:
        """A batch of an own worker was counted."""
        known = self._newest.get(batch.worker_id)
        if known is None or batch.covered_to_unix_ns >= known[0].covered_to_unix_ns:
            self._newest[batch.worker_id] = batch, now_ns

    def keep(self, windows: Sequence[WrittenWindow]) -> None:
        """These were written of own workers, and are to be told."""
        self._kept += windows

    def tell(self, fleet: Fleet, rollups: RollUps, now_ns: int) -> None:
        """What has been written of own workers, but for those that have long been silent, and what could not be told of
        such as were own then; also that this one lives."""
        windows, self._kept = self._kept, []
        away = self._unsent() > MAX_UNSENT
        if away:
            self._again.untold(windows)
        self._newest = {
            name: (batch, arrived_ns)
            for name, (batch, arrived_ns) in self._newest.items()
            if name in self._again.workers or (fleet.roll.is_own(name) and arrived_ns > now_ns - LISTED_NS)
        }
        if away:
            return
        newest = list(self._newest.values())[:MAX_WORKERS]
        workers = [shared_worker(batch, arrived_ns, fleet) for batch, arrived_ns in newest]
        for message in messages(workers, [*windows, *self._again.take(rollups, now_ns)]):
            message.metrics_id, message.incarnation = self.shares.own_id, self._began_ns
            message.told_unix_ns = now_ns
            self._publish(message)

    def hear(self, message: SharedWindows, now_ns: int, fleet: Fleet, rollups: RollUps, from_ns: int) -> None:
        """What another instance tells; of windows those from `from_ns` on. Of workers that come here too, what covers
        more counts."""
        told_ns = message.told_unix_ns
        if message.metrics_id == self.shares.own_id:
            self._hear_own_id(message)
            return
        fresh = abs(told_ns - now_ns) < MAX_APART_NS
        if fresh:
            self.shares.hear(message.metrics_id, now_ns)
        for worker in message.workers:
            # By the own clock, but for the way from there, whatever the other's says.
            arrived_ns = now_ns - max(told_ns - worker.arrived_unix_ns, 0)
            if not fleet.relay(worker, now_ns, arrived_ns if fresh else None, message.metrics_id):
                self.left_out[LeftOut.MALFORMED] += 1
        self._hear_windows(message, now_ns, rollups, max(from_ns, now_ns - MAX_AGE_NS))

    def _hear_own_id(self, message: SharedWindows) -> None:
        # What it told itself before it was started again is no other's.
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

    def take_heard(self, fleet: Fleet, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Windows that others have told of since it was last asked, and those that nobody tells of any more."""
        heard, self._heard, self._heard_cells = self._heard, [], 0
        return heard + self._overdue.write(fleet, rollups, now_ns)

    def tells_of(self, event: RequestEvent, fleet: Fleet, now_ns: int) -> bool:
        """Whether this instance makes the request's trace."""
        worker_id = event.decode_worker or event.prefill_worker
        if not worker_id:
            return self.shares.leads(now_ns)
        facts = fleet.roll.facts(worker_id)
        told_to_ns = None if facts is None else facts.covered_to_unix_ns
        return self.shares.traces(own=fleet.roll.is_own(worker_id), told_to_ns=told_to_ns, now_ns=now_ns)
