"""The state of the metrics service, updated record by record, and the reader of the bus that feeds it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from libs.bus.port import TAKEN_OVER_NS, Gap, LiveBus, Record
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandTotals
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Action, Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, RequestEvent, SharedWindows, StepBatch
from libs.contracts.topics import DECISIONS, DEMAND, QUEUES, REQUESTS, STEPS, WINDOWS, Topic
from libs.policy.alerts.burn import BurnLog
from libs.policy.reading import Shares
from libs.runtime.clock import Clock
from libs.telemetry.columns import PrefillShares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.gateways import GatewayReports
from libs.telemetry.history import History
from libs.telemetry.rollups import RollUps
from libs.telemetry.timeline import BatchOutcome
from libs.telemetry.workers import Loads, Members
from services.metrics.cluster_events import DecisionLog, Event, EventLog, WorkerLives, together
from services.metrics.requests import RequestLog, RequestMetrics
from services.metrics.sharing import Sharing

MS_NS: Final = 1_000_000
STALE_NS: Final = 3_000_000_000
"""The time without a record after which figures are not live. Workers send three or ten a second; the planner sends
some too.
"""


class MetricsState:
    """The telemetry of workers with its history, and the logs of requests, decisions and events."""

    def __init__(
        self,
        prefill_shares: PrefillShares,
        request_metrics: RequestMetrics,
        sharing: Sharing | None = None,
        *,
        observes: bool = False,
    ) -> None:
        """Create an empty state; without `sharing` this instance reads all telemetry itself.

        With `observes`, telemetry comes from servers' own metrics, without a broker.
        """
        self._observes = observes
        self.sharing = sharing
        self.rollups = RollUps()
        self.fleet = FleetTelemetry(prefill_shares, self.rollups.phases)
        self.members = Members()
        self.history = History(self.fleet, self.rollups, self.members, shared=sharing is not None)
        self.requests = RequestLog()
        self.gateways = GatewayReports()
        self.burns = BurnLog()
        self.events = EventLog()
        self.decision_log = DecisionLog()
        self._lives = WorkerLives()
        self.decisions: Counter[str] = Counter()
        self._request_metrics = request_metrics
        self._latest_ns: int | None = None
        self._sent_events = 0

    def take(self, record: Record, now_ns: int) -> None:
        value = record.value
        if isinstance(value, StepBatch):  # the usual case
            self._latest_ns = now_ns
            if self.fleet.add(value, now_ns) is BatchOutcome.COUNTED and self.sharing is not None:
                self.sharing.note(value, now_ns)
            return
        if isinstance(value, SharedWindows):
            if self.sharing is not None:
                self.sharing.hear(value, now_ns, self.fleet, self.rollups, self.history.resumed_ns)
            return
        if isinstance(value, GatewayQueues):  # idle clusters send these too, so figures do not count as live
            self.gateways.take(value, now_ns)
            return
        if isinstance(value, DemandTotals):
            return
        self._latest_ns = now_ns
        if isinstance(value, RequestEvent):
            finished = self.requests.add(value, now_ns)
            if finished is not None:
                self._request_metrics.observe(finished)
                for slo, bad in (("ttft", finished.ttft_missed), ("tpot", finished.tpot_missed)):
                    if bad is not None:
                        self.burns.add(finished.model, slo, now_ns, bad=bad)
                        self._request_metrics.judge(finished.model, slo, bad=bad)
        elif isinstance(value, Decision):
            self.events.add(value)
            self.decision_log.add(value)
            known = value.action in Action.values()
            self.decisions[Action.Name(value.action).removeprefix("ACTION_").lower() if known else "unknown"] += 1

    def look_at_workers(self, now_ns: int) -> None:
        """Record workers that have arrived, left or fallen silent as events."""
        directory = self.fleet.directory
        for alike in together(self._lives.look(directory.known(), directory.newest_cover_ns, now_ns)):
            self.events.add_lives(alike, now_ns)

    def unsent_events(self) -> list[Event]:
        """Return the events since the last call."""
        events = self.events.after(self._sent_events)
        self._sent_events = self.events.count
        return events

    def age_ns(self, now_ns: int) -> int | None:
        """Return the age of the shown data in ns."""
        return age_ns(self.fleet.directory.loads(now_ns), self.history.written_to_ns, now_ns)

    def not_live(self, now_ns: int) -> str | None:
        """Return the reason why figures are not live, in words; None if they are."""
        # Telemetry read by others counts by its arrival there. A record of an instance alone proves nothing.
        latest_ns = max(self._latest_ns or 0, self.fleet.latest_arrival_ns or 0)
        if self._observes and (not latest_ns or now_ns - latest_ns > STALE_NS):
            return "no observed server answers" + ("; figures are the last known" if latest_ns else "")
        if not latest_ns:
            return "nothing has arrived from the broker yet: no worker or planner sends, or the broker is away"
        silent_ns = now_ns - latest_ns
        if silent_ns <= STALE_NS:
            return None
        return (
            f"nothing has arrived from the broker for {silent_ns / 1e9:.1f} s: no worker sends, or the broker is away; "
            "figures are the last known"
        )


def age_ns(loads: Loads, written_to_ns: int | None, now_ns: int) -> int | None:
    """Return the time since the newest instant that the shown data cover, at least 0; None without workers.

    Data cover an instant if windows are written up to it and half of the workers that have not left have reported up to
    it. Times are by the clocks of this process and of each worker. A dead worker thus lowers coverage, but does not
    make the others' data old.
    """
    reported_to_ns = np.sort(loads.covered_to_ns[~loads.listing.left])[::-1]
    if not len(reported_to_ns):
        return None
    newest_ns = int(reported_to_ns[(len(reported_to_ns) - 1) // 2])
    return max(now_ns - (newest_ns if written_to_ns is None else min(newest_ns, written_to_ns)), 0)


RECORDS_A_TURN: Final = 100
"""Records between two turns of the event loop, 2 to 3 ms."""
Take = Callable[[Record, int], None]
"""A function that records a value of the bus received at a Unix ns."""


def read_from_ns(kept_from_ns: int | None, now_ns: int, *, shared: bool) -> int:
    """Return the time from which a service that starts now reads.

    That is the end of kept history or else the service's start, however long finding the ends of its topics takes. A
    service that shares reads from before its start, since its partitions may have had no reader.
    """
    if kept_from_ns is not None:
        return kept_from_ns
    return now_ns - TAKEN_OVER_NS if shared else now_ns


async def ingest(
    bus: LiveBus,
    takers: Sequence[Take],
    clock: Clock,
    *,
    on_gap: Callable[[Gap], None],
    since_unix_ns: int | None = None,
    shares: Shares | None = None,
    gather_ms: Callable[[], int] | None = None,
) -> None:
    """Pass every record from now on, or since a time, to each taker; return when the bus closes.

    With `shares`, step telemetry is read from this instance's partitions only, along with records of other instances.
    Late step telemetry is skipped, and `on_gap` is called. `gather_ms` is passed to `LiveBus`.
    """

    def wanted(topic: Topic, partition: int) -> bool:
        return shares is None or topic is not STEPS or shares.mine(partition, clock.now_ns())

    topics = (STEPS, QUEUES, REQUESTS, DECISIONS, DEMAND, *(() if shares is None else (WINDOWS,)))
    taken = 0
    records = bus.subscribe_live(
        topics, jumping=(STEPS,), on_gap=on_gap, since_unix_ns=since_unix_ns, wanted=wanted, gather_ms=gather_ms
    )
    async for record in records:
        taken += 1
        if taken % RECORDS_A_TURN == 0:  # give ticks and readers a turn during a burst
            await asyncio.sleep(0)
        now_ns = clock.now_ns()
        for take in takers:
            take(record, now_ns)
