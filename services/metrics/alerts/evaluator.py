"""Evaluation of the alert rules on snapshots of the service's state."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from libs.policy.alerts.rules import AlertLimits, Condition
from libs.policy.alerts.snapshot import Snapshot
from libs.policy.alerts.store import Alert, AlertStore
from libs.policy.alerts.watch import AlertWatch, every_ns
from libs.policy.verdict.cause import Cause
from services.metrics.alerts.collect import take_snapshot
from services.metrics.state import MetricsState


class AlertEvaluator:
    """The alert evaluator, which passes alerts that fire or end to `observers`."""

    def __init__(self, state: MetricsState, limits: AlertLimits, *, lag_ns: int) -> None:
        self._state = state
        self._watch = AlertWatch(limits)
        self._lag_ns = lag_ns
        self._looked_ns = 0
        self._workers = 0
        """Number of workers at the last evaluation."""
        self.observers: list[Callable[[list[Alert]], None]] = []
        self.judged: Callable[[int], tuple[Sequence[Cause], frozenset[str]]] = lambda _: ((), frozenset())
        """Returns the verdict's causes at a moment, and the models for which enough is known to judge."""

    @property
    def book(self) -> AlertStore:
        return self._watch.book

    @property
    def unfollowed_signs(self) -> int:
        """Signs of subjects for which there was no room."""
        return self._watch.machine.unfollowed_signs

    def foresee(self, ahead: Sequence[Condition]) -> None:
        self._watch.ahead = ahead

    async def look(self, now_ns: int) -> list[Alert]:
        """Evaluate if it is time, and return the changed alerts.

        It yields to the event loop half-way, as each half takes as long as a round over 1,000 workers.
        """
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
        causes, judged = self.judged(now_ns)
        return replace(snapshot, causes=causes, judged=judged)

    def _decide(self, snapshot: Snapshot) -> list[Alert]:
        changed = self._watch.look(snapshot)
        if changed:
            for observer in self.observers:
                observer(changed)
        return changed
