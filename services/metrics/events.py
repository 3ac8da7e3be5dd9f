"""What planner and people did to the cluster: a bounded log. Pure."""

from collections import deque
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
)
from libs.contracts.roles import role_name

MAX_EVENTS: Final = 2_000
MAX_TEXT: Final = 500
"""Characters of a reason or a name that are kept."""
ENTERED: Final = frozenset((ACTION_ROLE_MOVED, ACTION_SET_MODE, ACTION_SET_LIMITS, ACTION_SET_ROLE, ACTION_SET_BUDGET))
"""Decisions to leave everything as it is are no events."""
MAX_NAMED: Final = 8
"""Workers of one decision that an event names; how many more there are it says too."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided or done."""

    number: int
    """Grows by one an event since this service started."""
    unix_ms: int
    action: str
    """role_moved (seen, whoever did it), set_role and set_budget (decided), set_mode or set_limits."""
    worker: str
    """Empty where it is about none; several are named with commas between them."""
    role: str
    actor: str
    reason: str
    planner: str


class EventLog:
    """The last events, as they came; a decision that comes twice is entered once."""

    def __init__(self) -> None:
        self._log: deque[tuple[tuple[str, int, int], Event]] = deque()
        self._known: set[tuple[str, int, int]] = set()
        self.count = 0

    def add(self, decision: Decision) -> Event | None:
        """Enter a decision; None when it is no event or has come before."""
        identity = (decision.planner_id, decision.incarnation, decision.sequence)
        if decision.action not in ENTERED or identity in self._known:
            return None
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
        self._log.append((identity, event))
        self._known.add(identity)
        if len(self._log) > MAX_EVENTS:
            self._known.discard(self._log.popleft()[0])
        return event

    def after(self, number: int) -> list[Event]:
        """Those entered later than event `number`, the oldest first."""
        return [event for _, event in self._log if event.number > number]

    def newest(self, limit: int) -> list[Event]:
        """At most so many, the newest first."""
        return [event for _, event in reversed(self._log)][:limit]


def _named(decision: Decision) -> str:
    names = [decision.worker_id] if decision.worker_id else [each.worker_id for each in decision.changes]
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _role(decision: Decision) -> str:
    """That the workers take, which is the same for all of a decision."""
    if decision.worker_id:
        return role_name(decision.assignment)
    return role_name(decision.changes[0].assignment) if decision.changes else ""
