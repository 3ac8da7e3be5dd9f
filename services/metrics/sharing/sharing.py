"""One of several instances: tells the others what it makes of its part, and takes what they make of theirs. Pure, but
for the bus that it is given to tell by."""

from collections.abc import Callable, Sequence
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent, SharedWindows, StepBatch
from libs.telemetry.fleet import LISTED_NS, MAX_WORKERS, Fleet
from libs.telemetry.history import WrittenWindow
from libs.telemetry.rollups import RollUps
from libs.telemetry.timeline import Taken
from services.metrics.sharing.shares import Shares
from services.metrics.sharing.wire import messages, shared_worker, written

MAX_HEARD_WINDOWS: Final = 4_096
"""That wait for the stream's next tick, each of one instance; what is beyond is in history only."""
MAX_AGE_NS: Final = 2 * LISTED_NS


class Sharing:
    """Between the own fleet and the others'."""

    def __init__(self, shares: Shares, publish: Callable[[SharedWindows], None]) -> None:
        self.shares = shares
        self._publish = publish
        self._newest: dict[str, tuple[StepBatch, int]] = {}
        self._heard: list[WrittenWindow] = []

    def note(self, batch: StepBatch, now_ns: int) -> None:
        """A batch of an own worker was counted."""
        known = self._newest.get(batch.worker_id)
        if known is None or batch.covered_to_unix_ns >= known[0].covered_to_unix_ns:
            self._newest[batch.worker_id] = batch, now_ns

    def tell(self, windows: Sequence[WrittenWindow], fleet: Fleet) -> None:
        """What has been written of own workers; also that this instance lives."""
        self._newest = {name: each for name, each in self._newest.items() if fleet.is_own(name)}
        workers = [
            shared_worker(batch, arrived_ns, fleet.last_step_end_ns(name), fleet.lost_batches(name))
            for name, (batch, arrived_ns) in list(self._newest.items())[:MAX_WORKERS]
        ]
        for message in messages(self.shares.own_id, workers, windows):
            self._publish(message)

    def hear(self, message: SharedWindows, now_ns: int, fleet: Fleet, rollups: RollUps) -> None:
        """What another instance tells. Of workers that come here too, what covers more counts."""
        if message.metrics_id == self.shares.own_id:
            return
        self.shares.hear(message.metrics_id, now_ns)
        for worker in message.workers:
            fleet.relay(worker)
        length = rollups.tiers[0].window_ns
        for window in message.windows:
            start_ns = window.start_unix_ns
            if start_ns % length or not now_ns - MAX_AGE_NS < start_ns <= now_ns + length:
                continue
            try:
                workers = list(written(window, message.workers, length))
            except ValueError:
                fleet.batches[Taken.MALFORMED] += 1
                continue
            taken = rollups.write(start_ns, workers, fuller=True)
            if taken and len(self._heard) < MAX_HEARD_WINDOWS:
                self._heard.append(WrittenWindow(start_ns, taken, revised=True))

    def take_heard(self) -> list[WrittenWindow]:
        """Windows that others have told of since it was last asked."""
        heard, self._heard = self._heard, []
        return heard

    def tells_of(self, event: RequestEvent, fleet: Fleet, now_ns: int) -> bool:
        """Whether this instance is the one that makes the request's trace: the one that reads the worker that told of
        its hand-off; of requests that no worker saw, the first of those who live."""
        worker_id = event.decode_worker or event.prefill_worker
        return fleet.is_own(worker_id) if worker_id else self.shares.alive(now_ns)[0] == self.shares.own_id
