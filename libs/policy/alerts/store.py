"""The alerts that fire, their latest changes, and silences. Callers pass in the time."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from libs.policy.alerts.rules import Condition, Labels, Name, Rule, Severity
from libs.policy.verdict.state import Grade

# Conditions of further subjects are counted but otherwise ignored.
MAX_SUBJECTS: Final = 16_384
# After a longer pause, no condition counts as continuous.
GAP_NS: Final = 5 * 10**9
# An alert ends when no snapshot has contained its subject for this long.
FORGET_NS: Final = 600 * 10**9
# Each time an alert fired within this span doubles its clear time, ...
FLAP_NS: Final = 1800 * 10**9
# ... up to this many doublings.
MAX_DOUBLINGS: Final = 4

Key = tuple[Name, Labels]


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state: an alert that fires or ends."""

    name: Name
    labels: Labels
    severity: Severity
    reason: str
    started_ns: int
    ended_ns: int | None
    command: str = ""
    """The command that ends the condition, as a user types it."""


@dataclass(slots=True)
class _AlertTrack:
    """The state of one subject, such as a pool or a worker."""

    seen_ns: int
    pending_ns: int | None = None
    """The time since which the condition has held."""
    fired: Transition | None = None
    clear_ns: int | None = None
    """The time since which the condition has been clear while the alert fires."""
    fires_ns: list[int] = field(default_factory=list)


class AlertStateMachine:
    """A state machine over all subjects; `step` needs increasing times."""

    def __init__(self, rules: Mapping[Name, Rule]) -> None:
        self._rules = rules
        self._tracks: dict[Key, _AlertTrack] = {}
        self._last_ns: int | None = None
        self.unfollowed_signs = 0

    def step(self, at_ns: int, conditions: Iterable[Condition]) -> list[Transition]:
        """Return the transitions at a moment; none if it is not later than the last one."""
        if self._last_ns is not None and at_ns <= self._last_ns:
            return []
        if self._last_ns is not None and at_ns - self._last_ns > GAP_NS:
            self._forget_spans()
        self._last_ns = at_ns
        changed = [transition for condition in conditions if (transition := self._take(at_ns, condition))]
        return changed + self._sweep(at_ns)

    def followed(self, label: str) -> set[str]:
        """Return the values of a label among the tracked subjects."""
        return {value for _, labels in self._tracks for name, value in labels if name == label}

    def _take(self, at_ns: int, condition: Condition) -> Transition | None:
        key = (condition.name, condition.labels)
        track = self._tracks.get(key)
        if track is None:
            if condition.grade is not Grade.FIRE:
                return None
            if len(self._tracks) >= MAX_SUBJECTS:
                self.unfollowed_signs += 1
                return None
            track = self._tracks[key] = _AlertTrack(at_ns)
        track.seen_ns = at_ns
        rule = self._rules[condition.name]
        return self._end(track, at_ns, condition, rule) if track.fired else self._fire(track, at_ns, condition, rule)

    def _fire(self, track: _AlertTrack, at_ns: int, condition: Condition, rule: Rule) -> Transition | None:
        if condition.grade is not Grade.FIRE:
            track.pending_ns = None
            return None
        track.pending_ns = at_ns if track.pending_ns is None else track.pending_ns
        if at_ns - track.pending_ns < rule.for_ns:
            return None
        track.fires_ns = [*(fired_ns for fired_ns in track.fires_ns if fired_ns > at_ns - FLAP_NS), at_ns]
        track.fired = Transition(
            condition.name, condition.labels, condition.severity, condition.reason, at_ns, None, condition.command
        )
        track.pending_ns = track.clear_ns = None
        return track.fired

    def _end(self, track: _AlertTrack, at_ns: int, condition: Condition, rule: Rule) -> Transition | None:
        if condition.grade is not Grade.CLEAR:
            track.clear_ns = None
            return None
        track.clear_ns = at_ns if track.clear_ns is None else track.clear_ns
        doublings = min(sum(fired_ns > at_ns - FLAP_NS for fired_ns in track.fires_ns) - 1, MAX_DOUBLINGS)
        if at_ns - track.clear_ns < rule.clear_ns * 2 ** max(doublings, 0):
            return None
        return self._over(track, at_ns, condition.reason)

    def _over(self, track: _AlertTrack, at_ns: int, reason: str) -> Transition:
        fired, track.fired, track.clear_ns = track.fired, None, None
        assert fired is not None
        return Transition(fired.name, fired.labels, fired.severity, reason, fired.started_ns, at_ns)

    def _sweep(self, at_ns: int) -> list[Transition]:
        """End alerts whose subject is gone, and forget quiet subjects."""
        over = []
        for key, track in list(self._tracks.items()):
            if track.fired and track.seen_ns <= at_ns - FORGET_NS:
                over.append(self._over(track, at_ns, f"no data for {FORGET_NS // 10**9} s"))
            if track.seen_ns < at_ns:
                track.pending_ns = track.clear_ns = None
            if track.fired or track.pending_ns is not None:
                continue
            track.fires_ns = [fired_ns for fired_ns in track.fires_ns if fired_ns > at_ns - FLAP_NS]
            if not track.fires_ns:
                del self._tracks[key]
        return over

    def _forget_spans(self) -> None:
        for track in self._tracks.values():
            track.pending_ns = track.clear_ns = None


MAX_RECENT: Final = 1_000
MS_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Alert:
    number: int
    """The number of this change; it grows by one from the start of the service."""
    id: str
    """The alert's name and labels, which stay the same when it ends and fires again."""
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
    """The reason with its figures at the last evaluation, while the alert fires."""
    clearing: bool = False
    """True if the alert still fires although its condition was gone at the last evaluation."""
    command: str = ""
    """The command that ends the condition, as of the last evaluation; empty if none is known or needed."""

    @property
    def called(self) -> str:
        """Reason and command in one line, for webhooks and topics."""
        return f"{self.reason} Run: {self.command}" if self.command else self.reason


class AlertStore:
    """The firing alerts, and a bounded history of numbered changes."""

    def __init__(self) -> None:
        self.runbook_url = "/runbook"
        self.held_back: Sequence[str] = ()
        """The names of alerts that are frozen because their telemetry is old."""
        self._firing: dict[str, Alert] = {}
        self._recent: deque[Alert] = deque(maxlen=MAX_RECENT)
        self.count = 0
        """The number of changes so far, used to number the next one."""

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
        """Return the firing alerts, oldest first."""
        return list(self._firing.values())

    def newest(self, limit: int) -> list[Alert]:
        """Return at most `limit` changes, newest first."""
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


# A silence covers all alerts of a name or with certain labels for a time. An acknowledgement covers one alert and ends
# with it. Neither changes the evaluation: an alert still fires, but is shown as silenced.


MAX_SILENCES: Final = 256
"""The maximum number of silences and acknowledgements in force at a time."""
LEAST_NS: Final = 60 * 10**9
MOST_NS: Final = 7 * 86_400 * 10**9
"""The longest duration of a silence or of an acknowledgement, however long its alert fires."""
MAX_LABELS: Final = 8
MAX_TEXT_CHARS: Final = 200
"""The limit for a reason, an actor or a label."""
MAX_ALERT_ID_CHARS: Final = 2_000
MAX_ID_CHARS: Final = 64
AHEAD_NS: Final = 300 * 10**9
"""The tolerated lead of another service's clock."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence with a name or labels, or an acknowledgement with an `alert_id`."""

    id: str
    made_ns: int
    until_ns: int
    # If a silence has several versions, the last changed version counts.
    changed_ns: int
    actor: str
    reason: str
    name: str = ""
    """The name of the alerts to silence; empty for any name."""
    labels: Labels = ()
    """Labels that an alert must have; it may have others."""
    alert_id: str = ""
    ended: bool = False
    """True if somebody ended it, or its acknowledged alert has ended."""

    @property
    def is_ack(self) -> bool:
        """Return whether the silence is the acknowledgement of one alert."""
        return bool(self.alert_id)

    def holds(self, now_ns: int) -> bool:
        return not self.ended and now_ns < self.until_ns

    def matches(self, alert: Alert) -> bool:
        """Return whether the silence or acknowledgement covers an alert."""
        if self.is_ack:
            return alert.id == self.alert_id
        named = not self.name or alert.name == self.name
        return named and all(alert.labels.get(label) == value for label, value in self.labels)


def fault_of(silence: Silence) -> str:
    """Describe the fault of a requested silence; return an empty string if it is valid."""
    length_ns = silence.until_ns - silence.made_ns
    texts = (silence.actor, silence.reason, *(part for label in silence.labels for part in label))
    if not LEAST_NS <= length_ns <= MOST_NS:
        return (
            f"it lasts {length_ns / 1e9:g} s: {LEAST_NS // 10**9} s to {MOST_NS // (86_400 * 10**9)} days are allowed"
        )
    if max(map(len, texts)) > MAX_TEXT_CHARS or len(silence.alert_id) > MAX_ALERT_ID_CHARS:
        return f"a reason, an actor and a label have at most {MAX_TEXT_CHARS} characters"
    if not 0 < len(silence.id) <= MAX_ID_CHARS:
        return f"its id has {len(silence.id)} characters: 1 to {MAX_ID_CHARS} are allowed"
    if len(silence.labels) > MAX_LABELS:
        return f"it names {len(silence.labels)} labels: {MAX_LABELS} are allowed"
    if silence.name and silence.name not in set(Name):
        return f"there is no alert {silence.name[:MAX_TEXT_CHARS]!r}, but: {', '.join(Name)}"
    if not (silence.name or silence.labels or silence.alert_id):
        return "it would silence every alert: name one, or a label"
    return ""


class SilenceRegistry:
    """Silences by id, with ended ones kept until they expire so that a late message cannot revive them."""

    def __init__(self) -> None:
        self._known: dict[str, Silence] = {}

    def take(self, silence: Silence, now_ns: int) -> bool:
        """Add or update a silence from any source; return whether anything changed."""
        self._forget(now_ns)
        known = self._known.get(silence.id)
        if fault_of(silence) or not now_ns < silence.until_ns <= now_ns + MOST_NS + AHEAD_NS:
            return False
        if known is not None and known.changed_ns >= silence.changed_ns:
            return False
        if known is None and not self.has_room(now_ns):
            return False
        self._known[silence.id] = silence
        return True

    def has_room(self, now_ns: int) -> bool:
        """Return whether there is room for another silence."""
        self._forget(now_ns)
        return len(self._known) < MAX_SILENCES

    def get(self, silence_id: str, now_ns: int) -> Silence | None:
        found = self._known.get(silence_id)
        return found if found is not None and found.holds(now_ns) else None

    def knows(self, silence_id: str) -> bool:
        """Return whether a silence of this id exists or existed."""
        return silence_id in self._known

    def holding(self, now_ns: int) -> list[Silence]:
        """Return the silences in force, in the order of their addition."""
        return [each for each in self._known.values() if each.holds(now_ns)]

    def silenced(self, alert: Alert, now_ns: int) -> Silence | None:
        """Return the silence that covers an alert for the longest time, or None if there is none."""
        found = [each for each in self.holding(now_ns) if not each.is_ack and each.matches(alert)]
        return max(found, key=lambda each: each.until_ns, default=None)

    def loud(self, alerts: Iterable[Alert], now_ns: int) -> list[Alert]:
        """Return the alerts that no silence covers."""
        holding = [each for each in self.holding(now_ns) if not each.is_ack]
        return [alert for alert in alerts if not any(each.matches(alert) for each in holding)]

    def over(self, alerts: Iterable[Alert], now_ns: int) -> list[Silence]:
        """Return acknowledgements of ended alerts, marked as ended.

        The caller passes them to `take` and to other instances.
        """
        ids = {alert.id for alert in alerts if alert.state != "firing"}
        acks = [each for each in self.holding(now_ns) if each.alert_id in ids] if ids else []
        return [ended(each, now_ns) for each in acks]

    def _forget(self, now_ns: int) -> None:
        for each in [each for each in self._known.values() if each.until_ns <= now_ns]:
            del self._known[each.id]


def ended(silence: Silence, now_ns: int) -> Silence:
    """Return the silence marked as ended, with a later change time than any known version."""
    return replace(silence, ended=True, changed_ns=max(now_ns, silence.changed_ns + 1))
