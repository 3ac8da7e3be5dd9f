"""Hysteresis that turns conditions over time into alerts that fire once, end once and do not flap."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from libs.policy.alerts.rules import Condition, Labels, Name, Rule, Severity
from libs.policy.grade import Grade

# Conditions of further subjects are counted and otherwise ignored.
MAX_SUBJECTS: Final = 16_384
# After a longer pause no condition counts as having lasted through it.
GAP_NS: Final = 5 * 10**9
# An alert ends when no snapshot has contained its subject for this long.
FORGET_NS: Final = 600 * 10**9
# Each time that an alert fired within this span doubles the time for which it must be clear, ...
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
class _Track:
    """The state of one subject, such as a pool or a worker."""

    seen_ns: int
    pending_ns: int | None = None
    """The time since which the condition has held."""
    fired: Transition | None = None
    clear_ns: int | None = None
    """The time since which the condition has been clear while the alert fires."""
    fires_ns: list[int] = field(default_factory=list)


class AlertStateMachine:
    """The state of all subjects over time; `step` needs growing times."""

    def __init__(self, rules: Mapping[Name, Rule]) -> None:
        self._rules = rules
        self._tracks: dict[Key, _Track] = {}
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
        """End alerts whose subject is gone, and forget quiet subjects."""
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
