"""Looks at what the service knows every so often, and tells of alerts that fire or end."""

import asyncio
from collections.abc import Callable
from typing import Final

from services.metrics.alerts.book import Alert, AlertBook
from services.metrics.alerts.collect import take_snapshot
from services.metrics.alerts.limits import Limits
from services.metrics.alerts.snapshot import Snapshot
from services.metrics.alerts.watch import AlertWatch
from services.metrics.state import MetricsState

EVERY_NS: Final = 200_000_000
"""Two ticks: a look over 1,000 workers takes some milliseconds."""


class AlertDesk:
    """The watch over a state; who wants to hear of changes is in `tell`."""

    def __init__(self, state: MetricsState, limits: Limits, *, lag_ns: int) -> None:
        self._state = state
        self._watch = AlertWatch(limits)
        self._lag_ns = lag_ns
        self._looked_ns = 0
        self.tell: list[Callable[[list[Alert]], None]] = []

    @property
    def book(self) -> AlertBook:
        """What fires, and the last changes."""
        return self._watch.book

    @property
    def unfollowed_signs(self) -> int:
        """Signs of subjects for which there was no room."""
        return self._watch.machine.unfollowed_signs

    def look(self, now_ns: int) -> list[Alert]:
        """What has changed, if it is time for a look."""
        return self._decide(self._snapshot(now_ns)) if self._is_time(now_ns) else []

    async def look_in_turns(self, now_ns: int) -> list[Alert]:
        """The same, with a turn for others half-way: over 1,000 workers either half takes as long as a round."""
        if not self._is_time(now_ns):
            return []
        snapshot = self._snapshot(now_ns)
        await asyncio.sleep(0)
        return self._decide(snapshot)

    def _is_time(self, now_ns: int) -> bool:
        if now_ns // EVERY_NS == self._looked_ns // EVERY_NS:
            return False
        self._looked_ns = now_ns
        return True

    def _snapshot(self, now_ns: int) -> Snapshot:
        state = self._state
        return take_snapshot(
            state.fleet,
            state.rollups,
            state.gateways,
            state.burns,
            now_ns,
            lag_ns=self._lag_ns,
            window_ns=self._watch.limits.window_ns,
        )

    def _decide(self, snapshot: Snapshot) -> list[Alert]:
        changed = self._watch.look(snapshot)
        if changed:
            for tell in self.tell:
                tell(changed)
        return changed
