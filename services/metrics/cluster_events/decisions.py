"""The planner's last decisions with reasons and alternatives, as the page and the command line show them. Pure."""

from typing import Final

import msgspec

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, Action, Candidate, Decision, Mode, Seen
from libs.contracts.roles import role_name

MAX_DECISIONS: Final = 500
MAX_TEXT: Final = 1_000
MAX_CHANGES: Final = 64
"""The most workers of one decision that are named."""
MAX_CANDIDATES: Final = 8
RECOMMEND: Final = "recommend"


class ReportedChange(msgspec.Struct, frozen=True):
    """A worker's assignment under a decision."""

    worker: str
    role: str
    budget_tokens: int


class ReportedCandidate(msgspec.Struct, frozen=True):
    """A split of the model's workers with its predictions; pressures above 1 grow into a queue."""

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
    """One decision; `candidates` begin with the chosen one, and `measured` is null until it is known."""

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
    """The last decisions with a change, made or recommended, and the newest one without."""

    def __init__(self) -> None:
        self._log: dict[str, ReportedDecision] = {}
        """Decisions by id, the oldest first."""
        self._kept: ReportedDecision | None = None

    def add(self, decision: Decision) -> None:
        """Record a decision.

        A decision published again with its measured effect replaces the first record. Of consecutive
        recommendations for a model only the newest is kept.
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
        id=f"{decision.planner_id}.{decision.incarnation // 1_000_000_000}.{decision.sequence}"[:MAX_TEXT],
        unix_ms=decision.decided_unix_ns // 1_000_000,
        planner=decision.planner_id[:MAX_TEXT],
        mode=_word(Mode.Name(decision.mode), "MODE_") if decision.mode in Mode.values() else "unknown",
        action=_word(Action.Name(decision.action), "ACTION_") if decision.action in Action.values() else "unknown",
        code=decision.reason_code[:MAX_TEXT],
        reason=decision.reason[:MAX_TEXT],
        actor=decision.actor[:MAX_TEXT],
        model=decision.model[:MAX_TEXT],
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
