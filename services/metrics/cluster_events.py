"""Changes of the cluster: workers' lives, changes by planner and operators, and decisions with their reasons. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Final

import msgspec

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_ROLE_MOVED,
    ACTION_SET_BUDGET,
    ACTION_SET_LIMITS,
    ACTION_SET_MODE,
    ACTION_SET_ROLE,
    Action,
    Candidate,
    Decision,
    Measured,
    Mode,
    Seen,
)
from libs.contracts.roles import role_name
from libs.telemetry.lives import SILENT_AFTER_NS
from libs.telemetry.workers import WorkerFacts

LOOK_NS: Final = 500_000_000
"""The interval between two checks of the workers."""
YOUNG_NS: Final = 60_000_000_000
"""The age up to which a worker counts as new at its first report. An older one existed before this service read it."""


class LifeChange(Enum):
    STARTED = "worker_started"
    RESTARTED = "worker_restarted"
    LEFT = "worker_left"
    LOST = "worker_lost"
    BACK = "worker_back"


@dataclass(frozen=True, slots=True)
class Life:
    """A change of one worker's state, with its reason in words."""

    change: LifeChange
    worker: str
    role: str
    reason: str


@dataclass(slots=True)
class _Known:
    incarnation: int
    covered_to_ns: int
    left: bool
    silent: bool


class WorkerLives:
    """The last known state of each worker, as many as the directory holds."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._looked_ns: int | None = None

    def look(self, workers: Iterable[WorkerFacts], newest_cover_ns: int, now_ns: int) -> list[Life]:
        """Return the changes since the last check, or nothing if that was less than `LOOK_NS` ago.

        Silence is measured against the newest report of any worker, so no worker counts as lost when all are silent.
        The first check returns nothing.
        """
        if self._looked_ns is not None and 0 <= now_ns - self._looked_ns < LOOK_NS:
            return []
        first, self._looked_ns = self._looked_ns is None, now_ns
        silent_since_ns = min(newest_cover_ns, now_ns) - SILENT_AFTER_NS
        seen, found = set(), []
        for facts in workers:
            seen.add(facts.worker_id)
            known = self._known.get(facts.worker_id)
            silent = facts.covered_to_unix_ns < silent_since_ns and not facts.left
            reported = _new(facts, now_ns) if known is None else _changed(known, facts, silent=silent)
            self._known[facts.worker_id] = _Known(facts.incarnation, facts.covered_to_unix_ns, facts.left, silent)
            if reported is not None and not first:
                found.append(Life(reported[0], facts.worker_id, role_name(facts.assignment), reported[1]))
        for worker_id in self._known.keys() - seen:
            del self._known[worker_id]
        return found


def _new(facts: WorkerFacts, now_ns: int) -> tuple[LifeChange, str] | None:
    # An incarnation is the Unix time in ns at which a worker started.
    young = 0 <= now_ns - facts.incarnation < YOUNG_NS
    return (LifeChange.STARTED, "first telemetry of this process") if young and not facts.left else None


def _changed(known: _Known, facts: WorkerFacts, *, silent: bool) -> tuple[LifeChange, str] | None:
    if facts.incarnation > known.incarnation:
        away_s = max(facts.covered_to_unix_ns - known.covered_to_ns, 0) / 1e9
        how = "it had drained" if known.left else "it had not drained"
        return LifeChange.RESTARTED, f"back after {away_s:.1f} s; {how}"
    if facts.left and not known.left:
        return LifeChange.LEFT, "drained and left"
    if silent and not known.silent:
        return LifeChange.LOST, f"no telemetry for {SILENT_AFTER_NS / 1e9:g} s, while other workers report"
    if known.silent and not silent and not facts.left:
        return LifeChange.BACK, "telemetry is back"
    return None


def together(lives: Iterable[Life]) -> Iterator[list[Life]]:
    """Group the changes of one check that are alike. Eight workers of one host make one event."""
    order = sorted(lives, key=lambda life: (life.change.value, life.role, life.reason, life.worker))
    for _, alike in groupby(order, key=lambda life: (life.change, life.role, life.reason)):
        yield list(alike)


MAX_EVENTS: Final = 2_000
MAX_TEXT: Final = 500
"""The maximum number of characters kept of a reason or a name."""
ENTERED: Final = frozenset((ACTION_ROLE_MOVED, ACTION_SET_MODE, ACTION_SET_LIMITS, ACTION_SET_ROLE, ACTION_SET_BUDGET))
"""The actions that make an event; decisions without a change make none."""
CHANGES: Final = frozenset((ACTION_SET_ROLE, ACTION_SET_BUDGET))
"""The actions that change workers and whose effect is measured later."""
EFFECT: Final = "effect"
NO_BOUND: Final = 1_000.0
"""The pressure that planners send for a phase without workers."""
MAX_NAMED: Final = 8
"""The maximum number of workers of one decision that an event names, followed by the number of further ones."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the cluster or of a worker."""

    number: int
    """The event's number, counted since this service started."""
    unix_ms: int
    action: str
    """The kind of event.

    Decisions are set_role, set_budget, set_mode and set_limits. A role_moved was observed, whoever caused it. An effect
    holds measurements taken some time after a change, which prove no cause. Workers' lives are worker_started,
    worker_restarted, worker_left, worker_lost (silent) and worker_back.
    """
    worker: str
    """The ids of the workers, separated by commas; empty if no worker is concerned."""
    role: str
    actor: str
    reason: str
    planner: str


class EventLog:
    """The last events in order of arrival; a repeated decision is entered once."""

    def __init__(self) -> None:
        self._log: deque[tuple[tuple[str, int, int], Event]] = deque()
        self._known: set[tuple[str, int, int]] = set()
        self.count = 0

    def add(self, decision: Decision) -> Event | None:
        """Enter a decision, and its effect once measured. Return None if it makes no event or was entered before."""
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
            reason=f"{measured.after_ms / 1e3:.1f} s later prefill pressure"
            f" {pressure_change(measured, 'prompt_pressure')}"
            f", decode pressure {pressure_change(measured, 'decode_pressure')}",
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


def pressure_change(measured: Measured, field: str) -> str:
    """Format a change as "1.80 → 0.90", with "without bound" in place of a pressure of `NO_BOUND` or more."""
    before, after = getattr(measured.before, field), getattr(measured.after, field)
    return " → ".join(f"{each:.2f}" if each < NO_BOUND else "without bound" for each in (before, after))


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


MAX_DECISIONS: Final = 500
MAX_REASON: Final = 1_000
MAX_CHANGES: Final = 64
"""The maximum number of workers of one decision that are named."""
MAX_CANDIDATES: Final = 8
RECOMMEND: Final = "recommend"


class ReportedChange(msgspec.Struct, frozen=True):
    worker: str
    role: str
    budget_tokens: int


class ReportedCandidate(msgspec.Struct, frozen=True):
    """A split of the model's workers, with its predicted pressures. Above 1, a queue grows."""

    prefill: int
    decode: int
    prompt_pressure: float
    decode_pressure: float
    ttft_ms: float
    tpot_ms: float
    served: float


class ReportedSeen(msgspec.Struct, frozen=True):
    """The measured pressure on the model's workers."""

    prefill: int
    decode: int
    prompt_pressure: float
    decode_pressure: float


class ReportedMeasured(msgspec.Struct, frozen=True):
    """Pressure before and after a decision. It proves no effect, as other things happened in between."""

    before: ReportedSeen
    after: ReportedSeen
    after_ms: int


class ReportedDecision(msgspec.Struct, frozen=True):
    """One decision. `candidates` begin with the chosen one, and `measured` is null until the effect is known."""

    id: str
    unix_ms: int
    planner: str
    mode: str
    action: str
    code: str
    reason: str
    actor: str
    model: str
    changes: list[ReportedChange]
    candidates: list[ReportedCandidate]
    measured: ReportedMeasured | None


class DecisionLog:
    """The last decisions with a change, made or recommended, and the newest decision without one."""

    def __init__(self) -> None:
        self._log: dict[str, ReportedDecision] = {}
        """The last decisions by id, in order of arrival."""
        self._kept: ReportedDecision | None = None

    def add(self, decision: Decision) -> None:
        """Record a decision.

        A decision published again with its measured effect replaces the first record. Only the newest of consecutive
        recommendations for a model is kept.
        """
        reported = _reported(decision)
        if decision.action == ACTION_KEEP:
            self._kept = reported
            return
        last = next(reversed(self._log.values()), None)
        if last is not None and last.action == reported.action == RECOMMEND and last.model == reported.model:
            del self._log[last.id]
        self._log[reported.id] = reported
        if len(self._log) > MAX_DECISIONS:
            del self._log[next(iter(self._log))]

    def newest(self, limit: int, *, keeps: bool = False) -> list[ReportedDecision]:
        """Return the newest `limit` decisions, the newest first; `keeps` includes the newest one without a change."""
        kept = [self._kept] if keeps and self._kept is not None else []
        return sorted([*kept, *self._log.values()], key=lambda each: each.unix_ms, reverse=True)[:limit]


def _reported(decision: Decision) -> ReportedDecision:
    changes = [ReportedChange(each.worker_id, role_name(each.assignment), each.assignment.budget_tokens)
               for each in decision.changes[:MAX_CHANGES]]  # fmt: skip
    if decision.worker_id:
        assignment = decision.assignment
        changes.append(ReportedChange(decision.worker_id, role_name(assignment), assignment.budget_tokens))
    measured = None
    if decision.HasField("measured"):
        found = decision.measured
        measured = ReportedMeasured(_seen(found.before), _seen(found.after), found.after_ms)
    return ReportedDecision(
        id=f"{decision.planner_id}.{decision.incarnation // 1_000_000_000}.{decision.sequence}"[:MAX_REASON],
        unix_ms=decision.decided_unix_ns // 1_000_000,
        planner=decision.planner_id[:MAX_REASON],
        mode=_word(Mode.Name(decision.mode), "MODE_") if decision.mode in Mode.values() else "unknown",
        action=_word(Action.Name(decision.action), "ACTION_") if decision.action in Action.values() else "unknown",
        code=decision.reason_code[:MAX_REASON],
        reason=decision.reason[:MAX_REASON],
        actor=decision.actor[:MAX_REASON],
        model=decision.model[:MAX_REASON],
        changes=changes,
        candidates=[_candidate(each) for each in decision.candidates[:MAX_CANDIDATES]],
        measured=measured,
    )


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _candidate(each: Candidate) -> ReportedCandidate:
    return ReportedCandidate(
        prefill=each.prefill,
        decode=each.decode,
        prompt_pressure=each.prompt_pressure,
        decode_pressure=each.decode_pressure,
        ttft_ms=each.ttft_ms,
        tpot_ms=each.tpot_ms,
        served=each.served,
    )


def _seen(seen: Seen) -> ReportedSeen:
    return ReportedSeen(seen.prefill, seen.decode, seen.prompt_pressure, seen.decode_pressure)
