"""A bounded log of changes made by planner and operators, and of workers' lives. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_ROLE_MOVED,
    ACTION_SET_BUDGET,
    ACTION_SET_LIMITS,
    ACTION_SET_MODE,
    ACTION_SET_ROLE,
    Action,
    Decision,
    Measured,
)
from libs.contracts.roles import role_name
from services.metrics.cluster_events.lives import Life

MAX_EVENTS: Final = 2_000
MAX_TEXT: Final = 500
"""The most characters kept of a reason or a name."""
ENTERED: Final = frozenset((ACTION_ROLE_MOVED, ACTION_SET_MODE, ACTION_SET_LIMITS, ACTION_SET_ROLE, ACTION_SET_BUDGET))
"""Actions that make an event; decisions without a change do not."""
CHANGES: Final = frozenset((ACTION_SET_ROLE, ACTION_SET_BUDGET))
"""Changes of workers, whose effect is measured after a while."""
EFFECT: Final = "effect"
MAX_NAMED: Final = 8
"""The most workers of one decision that an event names, followed by the number of further ones."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the cluster, or what became of a worker."""

    number: int
    """Sequence number since this service started."""
    unix_ms: int
    action: str
    """The kind of event.

    Decisions are set_role, set_budget, set_mode and set_limits. A role_moved was observed, whoever caused it. An
    effect holds what was measured a while after a change, which proves no cause. Workers' lives are worker_started,
    worker_restarted, worker_left, worker_lost (silent) and worker_back.
    """
    worker: str
    """Ids of the workers, separated by commas; empty if no worker is concerned."""
    role: str
    actor: str
    reason: str
    planner: str


class EventLog:
    """The last events in order of arrival; a decision that comes twice is entered once."""

    def __init__(self) -> None:
        self._log: deque[tuple[tuple[str, int, int], Event]] = deque()
        self._known: set[tuple[str, int, int]] = set()
        self.count = 0

    def add(self, decision: Decision) -> Event | None:
        """Enter a decision, and its effect once it comes with what was measured; None if it is no event or was entered
        before.
        """
        identity = (decision.planner_id, decision.incarnation, decision.sequence)
        if decision.action not in ENTERED or identity in self._known:
            return self._add_effect(decision)
        self.count += 1
        event = Event(
            number=self.count,
            unix_ms=decision.decided_unix_ns // 1_000_000,
            action=Action.Name(decision.action).removeprefix("ACTION_").lower(),
            worker=_named(decision)[:MAX_TEXT],
            role=_role(decision),
            actor=decision.actor[:MAX_TEXT],
            reason=decision.reason[:MAX_TEXT],
            planner=decision.planner_id[:MAX_TEXT],
        )
        self._enter(identity, event)
        return event

    def _add_effect(self, decision: Decision) -> Event | None:
        identity = (f"{EFFECT} {decision.planner_id}", decision.incarnation, decision.sequence)
        if identity in self._known or decision.action not in CHANGES or not decision.HasField("measured"):
            return None
        self.count += 1
        measured = decision.measured
        event = Event(
            number=self.count,
            unix_ms=decision.decided_unix_ns // 1_000_000 + measured.after_ms,
            action=EFFECT,
            worker=_named(decision)[:MAX_TEXT],
            role=_role(decision),
            actor="",
            reason=f"{measured.after_ms / 1e3:.1f} s later prompts press {_change(measured, 'prompt_pressure')} and"
            f" decodes {_change(measured, 'decode_pressure')}",
            planner=decision.planner_id[:MAX_TEXT],
        )
        self._enter(identity, event)
        return event

    def add_lives(self, alike: Sequence[Life], now_ns: int) -> Event:
        """Enter one event for workers with the same change."""
        first = alike[0]
        self.count += 1
        event = Event(
            number=self.count,
            unix_ms=now_ns // 1_000_000,
            action=first.change.value,
            worker=_joined([each.worker for each in alike])[:MAX_TEXT],
            role=first.role,
            actor="",
            reason=first.reason[:MAX_TEXT],
            planner="",
        )
        self._enter(("", 0, self.count), event)
        return event

    def _enter(self, identity: tuple[str, int, int], event: Event) -> None:
        self._log.append((identity, event))
        self._known.add(identity)
        if len(self._log) > MAX_EVENTS:
            self._known.discard(self._log.popleft()[0])

    def after(self, number: int) -> list[Event]:
        """Return the events later than event `number`, the oldest first."""
        return [event for _, event in self._log if event.number > number]

    def newest(self, limit: int) -> list[Event]:
        """Return at most `limit` events, the newest first."""
        return [event for _, event in reversed(self._log)][:limit]


def _change(measured: Measured, field: str) -> str:
    """Format a change as "1.80 → 0.90"."""
    return f"{getattr(measured.before, field):.2f} → {getattr(measured.after, field):.2f}"


def _named(decision: Decision) -> str:
    return _joined([decision.worker_id] if decision.worker_id else [each.worker_id for each in decision.changes])


def _joined(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _role(decision: Decision) -> str:
    """Return the role that the decision gives its workers, which is the same for all of them."""
    if decision.worker_id:
        return role_name(decision.assignment)
    return role_name(decision.changes[0].assignment) if decision.changes else ""
