"""Alerts that fire, and the last changes. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from libs.policy.alerts.rules import Condition, Labels, Severity
from libs.policy.alerts.state_machine import Transition
from libs.policy.grade import Grade

MAX_RECENT: Final = 1_000
MS_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert in one state."""

    number: int
    """Of this change: grows by one since the service started."""
    id: str
    """Name and labels: the same when it fires, ends and fires again."""
    name: str
    state: Literal["firing", "resolved"]
    severity: Severity
    labels: dict[str, str]
    reason: str
    """In numbers, when it fired."""
    ended_because: str
    """In numbers, when it was over; empty while it fires."""
    started_unix_ms: int
    ended_unix_ms: int | None
    runbook_url: str
    now: str = ""
    """In numbers, at the last look, while it fires."""
    clearing: bool = False
    """It fires still, and what it fires for was gone at the last look."""
    command: str = ""
    """What ends it, as it is typed, by the last look: empty where that is not known, or is not needed any more."""

    @property
    def called(self) -> str:
        """Reason and command in one line, for webhooks and topics."""
        return f"{self.reason} Run: {self.command}" if self.command else self.reason


class AlertStore:
    """What fires, and the last changes, by number."""

    def __init__(self) -> None:
        self.runbook_url = "/runbook"
        """Where its pages are."""
        self.held_back: Sequence[str] = ()
        """Names of alerts that neither fire nor end now, since the telemetry that they stand on is old."""
        self._firing: dict[str, Alert] = {}
        self._recent: deque[Alert] = deque(maxlen=MAX_RECENT)
        self.count = 0
        """Changes so far."""

    def enter(self, transitions: Iterable[Transition]) -> list[Alert]:
        """The changes as alerts."""
        return [self._enter(transition) for transition in transitions]

    def follow(self, conditions: Iterable[Condition]) -> None:
        """Let what fires say how it is now; what has not lasted yet, or is not known now, says nothing."""
        if not self._firing:
            return
        for each in conditions:
            alert = self._firing.get(_id(each.name, each.labels)) if each.grade is not None else None
            clearing = each.grade is Grade.CLEAR
            if alert is None:
                continue
            known = replace(alert, now=each.reason, clearing=clearing, command=each.command)
            if known != alert:
                self._firing[alert.id] = known

    def firing(self) -> list[Alert]:
        """The longest firing first."""
        return list(self._firing.values())

    def newest(self, limit: int) -> list[Alert]:
        """At most `limit` changes, the newest first."""
        return list(reversed(self._recent))[:limit]

    def _enter(self, transition: Transition) -> Alert:
        self.count += 1
        alert = Alert(
            number=self.count,
            id=_id(transition.name, transition.labels),
            name=transition.name,
            state="firing",
            severity=transition.severity,
            labels=dict(transition.labels),
            reason=transition.reason,
            ended_because="",
            started_unix_ms=transition.started_ns // MS_NS,
            ended_unix_ms=None,
            runbook_url=f"{self.runbook_url}/{transition.name}",
            now=transition.reason,
            command=transition.command,
        )
        if transition.ended_ns is None:
            self._firing[alert.id] = alert
        else:
            fired = self._firing.pop(alert.id)
            alert = replace(
                fired,
                number=alert.number,
                state="resolved",
                clearing=False,
                command="",
                ended_because=transition.reason,
                ended_unix_ms=transition.ended_ns // MS_NS,
            )
        self._recent.append(alert)
        return alert


def _id(name: str, labels: Labels) -> str:
    """The same when it fires, ends and fires again."""
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inside}}}"
