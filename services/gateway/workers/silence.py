"""Detects workers that fall silent on an open connection (frozen, starved or cut off), so that work avoids them.

Silence is measured in time during which this process could read frames. Time by which a busy host delays the
process itself does not count.
"""

import asyncio
from collections import Counter

import structlog

from libs.policy.gateway.silence import MAX_SILENT_MS, QUIET_SHARE, SILENT_MS, Heard, whom_to_leave
from services.gateway.metrics import GatewayMetrics
from services.gateway.workers.fleet import WorkerLinks

log = structlog.get_logger()

TICK_MS = 25.0
# Counted of one tick at most: a longer tick shows that this process itself was late.
MAX_HEARD_MS = 2 * TICK_MS


class SilenceWatch:
    """The watch over every link's silence, which ends streams that stay silent for too long."""

    def __init__(
        self,
        fleet: WorkerLinks,
        metrics: GatewayMetrics,
        silent_after_ms: float = SILENT_MS,
        max_silent_ms: float = MAX_SILENT_MS,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._silent_after_ms = silent_after_ms
        self._max_silent_ms = max(max_silent_ms, silent_after_ms)
        self._away: dict[tuple[str, int], str] = {}
        """The models of workers whose streams were ended, by worker id and incarnation."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ticked_s = loop.time()
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            now_s = loop.time()
            self.tick((now_s - ticked_s) * 1000)
            ticked_s = now_s

    def tick(self, passed_ms: float) -> None:
        """Advance every link's silence by the time since the last tick."""
        heard_ms = min(passed_ms, MAX_HEARD_MS)
        self._metrics.late_s.inc((passed_ms - heard_ms) / 1000)
        links = [link for link in self._fleet.links if link.connected]
        for link in links:
            link.silent_ms += heard_ms
        quiet_ms = QUIET_SHARE * self._silent_after_ms
        self._fleet.quiet = frozenset(link.id for link in links if link.overdue_ms >= quiet_ms)
        if any(link.overdue_ms >= self._silent_after_ms for link in links):
            self._leave()

    def _leave(self) -> None:
        links = list(self._fleet.links)
        still_away = {(link.id, link.incarnation) for link in links if link.left}
        self._away = {key: model for key, model in self._away.items() if key in still_away}
        heard = [
            Heard(place, link.model, link.overdue_ms, link.view())
            for place, link in enumerate(links)
            if link.connected and not link.left
        ]
        for each in whom_to_leave(heard, Counter(self._away.values()), self._silent_after_ms, self._max_silent_ms):
            link = links[each.place]
            running, silent_ms = len(link.running), round(each.silent_ms)
            log.warning("worker is silent", worker=link.id, silent_ms=silent_ms, sequences=running)
            self._metrics.silences.inc()
            self._away[link.id, link.incarnation] = each.model
            link.leave()
