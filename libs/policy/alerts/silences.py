"""Silences and acknowledgements of alerts; time is passed in.

A silence covers all alerts of a name or with certain labels for a time. An acknowledgement covers one alert and
ends with it. Neither changes what is judged: an alert fires as before and is shown as silent.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from libs.policy.alerts.rules import Labels, Name
from libs.policy.alerts.store import Alert

MAX_SILENCES: Final = 256
"""The most silences and acknowledgements in force at a time."""
LEAST_NS: Final = 60 * 10**9
MOST_NS: Final = 7 * 86_400 * 10**9
"""The longest silence; the longest acknowledgement too, however long its alert fires."""
MAX_LABELS: Final = 8
MAX_TEXT_CHARS: Final = 200
"""The limit for a reason, an actor or a label."""
MAX_ALERT_ID_CHARS: Final = 2_000
MAX_ID_CHARS: Final = 64
AHEAD_NS: Final = 300 * 10**9
"""Tolerance for the clock of another service that is ahead."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence with a name or labels, or an acknowledgement with an `alert_id`."""

    id: str
    made_ns: int
    until_ns: int
    # Of several versions of a silence, the one that changed last counts.
    changed_ns: int
    actor: str
    reason: str
    name: str = ""
    """The name of the alerts to silence; empty for any name."""
    labels: Labels = ()
    """Labels that an alert must have, possibly among others."""
    alert_id: str = ""
    ended: bool = False
    """Whether somebody ended it, or its acknowledged alert has ended."""

    @property
    def is_ack(self) -> bool:
        """Whether it is the acknowledgement of one alert."""
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
    """Return a sentence with the fault of a requested silence; empty if it is valid."""
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


class SilenceBook:
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
        """Return whether the book has room for another silence."""
        self._forget(now_ns)
        return len(self._known) < MAX_SILENCES

    def get(self, silence_id: str, now_ns: int) -> Silence | None:
        """Return the silence of this id if it is in force."""
        found = self._known.get(silence_id)
        return found if found is not None and found.holds(now_ns) else None

    def knows(self, silence_id: str) -> bool:
        """Return whether a silence of this id exists or existed."""
        return silence_id in self._known

    def holding(self, now_ns: int) -> list[Silence]:
        """Return the silences in force, in the order of their addition."""
        return [each for each in self._known.values() if each.holds(now_ns)]

    def silenced(self, alert: Alert, now_ns: int) -> Silence | None:
        """Return the silence that covers an alert for longest, or None."""
        found = [each for each in self.holding(now_ns) if not each.is_ack and each.matches(alert)]
        return max(found, key=lambda each: each.until_ns, default=None)

    def loud(self, alerts: Iterable[Alert], now_ns: int) -> list[Alert]:
        """Return the alerts that no silence covers."""
        holding = [each for each in self.holding(now_ns) if not each.is_ack]
        return [alert for alert in alerts if not any(each.matches(alert) for each in holding)]

    def over(self, alerts: Iterable[Alert], now_ns: int) -> list[Silence]:
        """Return acknowledgements of ended alerts, marked as ended.

        They are to be passed to `take` and to other instances.
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
