"""The alerts that fire, and the latest changes."""

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
    number: int
    """The number of this change; it grows by one from the start of the service."""
    id: str
    """Name and labels, the same whenever the alert fires, ends and fires again."""
    name: str
    state: Literal["firing", "resolved"]
    severity: Severity
    labels: dict[str, str]
    reason: str
    """The reason with its figures when the alert fired."""
    ended_because: str
    """The reason with its figures when the alert ended; empty while it fires."""
    started_unix_ms: int
    ended_unix_ms: int | None
    runbook_url: str
    now: str = ""
    """The reason with its figures at the last look, while the alert fires."""
    clearing: bool = False
    """Whether the alert still fires although its condition was gone at the last look."""
    command: str = ""
    """The command that ends the condition, from the last look; empty if none is known or needed."""

    @property
    def called(self) -> str:
        """Reason and command in one line, for webhooks and topics."""
        return f"{self.reason} Run: {self.command}" if self.command else self.reason


class AlertStore:
    """The firing alerts, and a bounded history of numbered changes."""

    def __init__(self) -> None:
        self.runbook_url = "/runbook"
        self.held_back: Sequence[str] = ()
        """Names of alerts that neither fire nor end now because their telemetry is old."""
        self._firing: dict[str, Alert] = {}
        self._recent: deque[Alert] = deque(maxlen=MAX_RECENT)
        self.count = 0
        """The number of changes so far."""

    def enter(self, transitions: Iterable[Transition]) -> list[Alert]:
        """Record transitions and return them as alerts."""
        return [self._enter(transition) for transition in transitions]

    def follow(self, conditions: Iterable[Condition]) -> None:
        """Update firing alerts with their current reasons; conditions without a grade change nothing."""
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
        """Return the firing alerts, the longest firing first."""
        return list(self._firing.values())

    def newest(self, limit: int) -> list[Alert]:
        """Return at most `limit` changes, the newest first."""
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
    # Name and labels, so it stays the same when an alert fires, ends and fires again.
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inside}}}"
