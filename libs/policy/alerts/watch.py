"""The evaluation of all alert rules on successive snapshots; time is passed in."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from libs.policy.alerts.burn import burn_conditions
from libs.policy.alerts.causes import cause_conditions, is_explained
from libs.policy.alerts.pools import link_conditions, pool_conditions
from libs.policy.alerts.queues import QueueLog
from libs.policy.alerts.rules import ON_TELEMETRY, AlertLimits, Condition, held_back, make_rules
from libs.policy.alerts.snapshot import Snapshot
from libs.policy.alerts.state_machine import AlertStateMachine
from libs.policy.alerts.store import Alert, AlertStore
from libs.policy.alerts.worker_silence import CommonSilence
from libs.policy.alerts.workers import BusySince, worker_conditions
from libs.policy.grade import Grade

# Two ticks, for up to `WORKERS_A_STEP` workers.
EVERY_NS: Final = 200_000_000
# As many workers again delay the next look by `EVERY_NS`: at 3,000 workers a look takes 20 ms, every 1.2 s.
WORKERS_A_STEP: Final = 500


def every_ns(workers: int) -> int:
    """Return the interval between two looks at this many workers."""
    return EVERY_NS * max(-(-workers // WORKERS_A_STEP), 1)


class AlertWatch:
    """The rules and state that turn snapshots into alerts that fire or end."""

    def __init__(self, limits: AlertLimits) -> None:
        self.limits = limits
        self.machine = AlertStateMachine(make_rules(limits))
        self.book = AlertStore()
        self.ahead: Sequence[Condition] = ()
        """Conditions from the latest forecasts, repeated at every look."""
        self._queues = QueueLog()
        self._busy_since = BusySince()
        self._silence = CommonSilence(limits)

    def look(self, snapshot: Snapshot) -> list[Alert]:
        """Evaluate a snapshot and return the alerts that changed."""
        self._silence.note(snapshot)
        for pool in snapshot.pools:
            if pool.waiting is not None and not self._silence.all_silent:
                self._queues.add((pool.model, pool.phase), snapshot.at_ns, pool.waiting)
        self._busy_since.note(snapshot)
        self.book.held_back = ON_TELEMETRY if self._silence.all_silent else ()
        conditions = list(self._conditions(snapshot))
        changed = self.book.enter(self.machine.step(snapshot.at_ns, conditions))
        self.book.follow(conditions)
        return changed

    def _conditions(self, snapshot: Snapshot) -> Iterator[Condition]:
        followed = self.machine.followed("worker")
        judged = cause_conditions(snapshot, followed)
        links = link_conditions(snapshot.links)
        pools = chain(pool_conditions(snapshot.pools, self._queues, self.limits, snapshot.judged), judged, links)
        workers = worker_conditions(snapshot, self._busy_since, self._silence, self.limits, followed)
        for each in chain(map(held_back, pools) if self._silence.all_silent else pools, workers):
            fires = each.grade is Grade.FIRE
            yield replace(each, grade=Grade.HOLD) if fires and is_explained(each, snapshot.causes) else each
        yield from burn_conditions(snapshot.burns, self.limits)
        yield from self.ahead
