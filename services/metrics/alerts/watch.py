"""Looks at the cluster from moment to moment and keeps the book of alerts. Pure; time is passed in."""

from collections.abc import Iterator

from services.metrics.alerts.book import Alert, AlertBook
from services.metrics.alerts.burn import burn_signs
from services.metrics.alerts.hearing import Hearing
from services.metrics.alerts.limits import Limits
from services.metrics.alerts.machine import Machine
from services.metrics.alerts.pools import pool_signs
from services.metrics.alerts.queues import QueueLog
from services.metrics.alerts.rules import ON_TELEMETRY, make_rules
from services.metrics.alerts.sign import Sign, held_back
from services.metrics.alerts.snapshot import Snapshot
from services.metrics.alerts.workers import AtHand, worker_signs


class AlertWatch:
    """Snapshots in, alerts that fire or end out."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.machine = Machine(make_rules(limits))
        self.book = AlertBook()
        self._queues = QueueLog()
        self._at_hand = AtHand()
        self._hearing = Hearing(limits)

    def look(self, snapshot: Snapshot) -> list[Alert]:
        """What changes with this moment."""
        self._hearing.note(snapshot)
        for pool in snapshot.pools:
            if pool.waiting is not None and not self._hearing.all_silent:
                self._queues.add((pool.model, pool.phase), snapshot.at_ns, pool.waiting)
        self._at_hand.note(snapshot)
        self.book.held_back = ON_TELEMETRY if self._hearing.all_silent else ()
        return self.book.enter(self.machine.step(snapshot.at_ns, self._signs(snapshot)))

    def _signs(self, snapshot: Snapshot) -> Iterator[Sign]:
        pools = pool_signs(snapshot.pools, self._queues, self.limits)
        yield from map(held_back, pools) if self._hearing.all_silent else pools
        yield from worker_signs(snapshot, self._at_hand, self._hearing, self.limits, self.machine.followed("worker"))
        yield from burn_signs(snapshot.burns, self.limits)
