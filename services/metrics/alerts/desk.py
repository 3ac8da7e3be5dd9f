"""Looks at what the service knows every so often, and tells of alerts that fire or end."""

import asyncio
from collections.abc import Callable

from libs.policy.alerts.book import Alert, AlertBook
from libs.policy.alerts.limits import Limits
from libs.policy.alerts.snapshot import Snapshot
from libs.policy.alerts.watch import AlertWatch, every_ns
from services.metrics.alerts.collect import take_snapshot
from services.metrics.state import MetricsState


class AlertDesk:
    """The watch over a state; who wants to hear of changes is in `tell`."""

    def __init__(self, state: MetricsState, limits: Limits, *, lag_ns: int) -> None:
        self._state = state
        self._watch = AlertWatch(limits)
        self._lag_ns = lag_ns
        self._looked_ns = 0
        self._workers = 0
        """At the last look."""
        self.tell: list[Callable[[list[Alert]], None]] = []

    @property
    def book(self) -> AlertBook:
        """What fires, and the last changes."""
        return self._watch.book

    @property
    def unfollowed_signs(self) -> int:
        """Signs of subjects for which there was no room."""
        return self._watch.machine.unfollowed_signs

    async def look(self, now_ns: int) -> list[Alert]:
        """What has changed, if it is time for a look; with a turn for others half-way, since over 1,000 workers either
        half takes as long as a round."""
        if not self._is_time(now_ns):
            return []
        snapshot = self._snapshot(now_ns)
        await asyncio.sleep(0)
        return self._decide(snapshot)

    def _is_time(self, now_ns: int) -> bool:
        every = every_ns(self._workers)
        if now_ns // every == self._looked_ns // every:
            return False
        self._looked_ns = now_ns
        return True

    def _snapshot(self, now_ns: int) -> Snapshot:
        state = self._state
        snapshot = take_snapshot(
            state.fleet,
            state.rollups,
            state.gateways,
            state.burns,
            now_ns,
            lag_ns=self._lag_ns,
            window_ns=self._watch.limits.window_ns,
        )
        self._workers = len(snapshot.workers)
        return snapshot

    def _decide(self, snapshot: Snapshot) -> list[Alert]:
        changed = self._watch.look(snapshot)
        if changed:
            for tell in self.tell:
                tell(changed)
        return changed
