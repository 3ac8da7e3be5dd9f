"""Hysteresis: conditions over time become alerts that fire once, end once, and do not flap. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from libs.policy.alerts.rules import Condition, Labels, Name, Rule, Severity
from libs.policy.grade import Grade

MAX_SUBJECTS: Final = 16_384
"""Followed at a time; conditions of further ones are counted and do nothing."""
GAP_NS: Final = 5 * 10**9
"""After a longer pause nothing is known to have lasted through it."""
FORGET_NS: Final = 600 * 10**9
"""An alert is over when no snapshot has held its subject for this long."""
FLAP_NS: Final = 1800 * 10**9
"""For each time an alert has fired in this time before, it must be clear twice as long, ..."""
MAX_DOUBLINGS: Final = 4
"""... doubled at most this often."""

Key = tuple[Name, Labels]


@dataclass(frozen=True, slots=True)
class Transition:
    """An alert fires, or is over."""

    name: Name
    labels: Labels
    severity: Severity
    reason: str
    started_ns: int
    ended_ns: int | None
    """None when it fires."""
    command: str = ""
    """What ends it, as it is typed."""


@dataclass(slots=True)
class _Track:
    """What is known of one subject."""

    seen_ns: int
    pending_ns: int | None = None
    """Since when it has called for an alert."""
    fired: Transition | None = None
    clear_ns: int | None = None
    """Since when it has been clear, while it fires."""
    fires_ns: list[int] = field(default_factory=list)


class AlertStateMachine:
    """Follows every subject; to be stepped with growing times."""

    def __init__(self, rules: Mapping[Name, Rule]) -> None:
        self._rules = rules
        self._tracks: dict[Key, _Track] = {}
        self._last_ns: int | None = None
        self.unfollowed_signs = 0

    def step(self, at_ns: int, conditions: Iterable[Condition]) -> list[Transition]:
        """What changes at a moment; nothing for one that is not later than the last."""
        if self._last_ns is not None and at_ns <= self._last_ns:
            return []
        if self._last_ns is not None and at_ns - self._last_ns > GAP_NS:
            self._forget_spans()
        self._last_ns = at_ns
        changed = [transition for condition in conditions if (transition := self._take(at_ns, condition))]
        return changed + self._sweep(at_ns)

    def followed(self, label: str) -> set[str]:
        """What subjects that are followed have in a label."""
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
            track = self._tracks[key] = _Track(at_ns)
        track.seen_ns = at_ns
        rule = self._rules[condition.name]
        return self._end(track, at_ns, condition, rule) if track.fired else self._fire(track, at_ns, condition, rule)

    def _fire(self, track: _Track, at_ns: int, condition: Condition, rule: Rule) -> Transition | None:
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

    def _end(self, track: _Track, at_ns: int, condition: Condition, rule: Rule) -> Transition | None:
        if condition.grade is not Grade.CLEAR:
            track.clear_ns = None
            return None
        track.clear_ns = at_ns if track.clear_ns is None else track.clear_ns
        doublings = min(sum(fired_ns > at_ns - FLAP_NS for fired_ns in track.fires_ns) - 1, MAX_DOUBLINGS)
        if at_ns - track.clear_ns < rule.clear_ns * 2 ** max(doublings, 0):
            return None
        return self._over(track, at_ns, condition.reason)

    def _over(self, track: _Track, at_ns: int, reason: str) -> Transition:
        fired, track.fired, track.clear_ns = track.fired, None, None
        assert fired is not None
        return Transition(fired.name, fired.labels, fired.severity, reason, fired.started_ns, at_ns)

    def _sweep(self, at_ns: int) -> list[Transition]:
        """End alerts whose subject is gone, and forget quiet ones."""
        over = []
        for key, track in list(self._tracks.items()):
            if track.fired and track.seen_ns <= at_ns - FORGET_NS:
                over.append(self._over(track, at_ns, f"not heard of for {FORGET_NS // 10**9} s"))
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
