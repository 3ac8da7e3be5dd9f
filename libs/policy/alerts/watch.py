"""Looks at the cluster from moment to moment and keeps the book of alerts. Pure; time is passed in."""

from collections.abc import Iterator
from typing import Final

from libs.policy.alerts.book import Alert, AlertBook
from libs.policy.alerts.burn import burn_signs
from libs.policy.alerts.hearing import Hearing
from libs.policy.alerts.limits import Limits
from libs.policy.alerts.machine import Machine
from libs.policy.alerts.pools import pool_signs
from libs.policy.alerts.queues import QueueLog
from libs.policy.alerts.rules import ON_TELEMETRY, make_rules
from libs.policy.alerts.sign import Sign, held_back
from libs.policy.alerts.snapshot import Snapshot
from libs.policy.alerts.workers import AtHand, worker_signs

EVERY_NS: Final = 200_000_000
"""Two ticks, for up to `WORKERS_A_STEP` workers."""
WORKERS_A_STEP: Final = 500
"""For as many more the next look comes `EVERY_NS` later: at 3,000 workers, of which one takes 20 ms, every 1.2 s."""


def every_ns(workers: int) -> int:
    """How long it is from one look to the next over so many."""
    return EVERY_NS * max(-(-workers // WORKERS_A_STEP), 1)


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
