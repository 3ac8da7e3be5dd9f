"""What planner and people did to the cluster: a bounded log. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_ROLE_MOVED,
    ACTION_SET_MODE,
    ACTION_SET_ROLE,
    Action,
    Decision,
)
from libs.contracts.roles import role_name

MAX_EVENTS: Final = 2_000
MAX_TEXT: Final = 500
"""Characters of a reason or a name that are kept."""
TOLD: Final = frozenset((ACTION_ROLE_MOVED, ACTION_SET_MODE, ACTION_SET_ROLE))
"""Decisions to leave everything as it is are no events."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided or done."""

    number: int
    """Grows by one an event since this service started."""
    unix_ms: int
    action: str
    """role_moved (seen, whoever did it), set_role (decided) or set_mode."""
    worker: str
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
        if decision.action not in TOLD or identity in self._known:
            return None
        self.count += 1
        event = Event(
            number=self.count,
            unix_ms=decision.decided_unix_ns // 1_000_000,
            action=Action.Name(decision.action).removeprefix("ACTION_").lower(),
            worker=decision.worker_id[:MAX_TEXT],
            role=role_name(decision.assignment) if decision.worker_id else "",
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
