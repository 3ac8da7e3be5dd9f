"""The planner's last decision and the last role move. Pure; time is passed in."""

from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_ROLE_MOVED,
    ACTION_SET_LIMITS,
    ACTION_SET_MODE,
    MODE_AUTO,
    Decision,
    Mode,
)
from libs.contracts.roles import role_name
from libs.telemetry.rollups import MAX_WORKERS

HEARD_NS: Final = 5_000_000_000
"""The silence after which a planner no longer counts as live; a leading one publishes a decision a second."""
MAX_MODELS: Final = 64
"""The most models whose targets are remembered."""
MAX_TEXT: Final = 500
NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LastMove:
    """A worker that was seen in another role, whoever gave it."""

    worker: str
    from_role: str
    """The former role; empty where it is not known."""
    to_role: str
    actor: str
    reason: str
    at_unix_ms: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """The planner's state according to its decisions."""

    heard: bool
    mode: str | None
    """The mode off, advisory or auto; null before the first decision."""
    leader: str | None
    """Id of the leading planner; null if none reports or none leads."""
    acts: bool
    """Whether the planner gives workers the roles that it decides."""
    idle_because: str
    """Why a planner in mode auto does not act; empty if it does, or does not report."""
    decided_unix_ms: int | None
    reason: str
    reason_code: str
    last_move: LastMove | None


class PlannerNews:
    """The log of what the planner's decisions report."""

    def __init__(self) -> None:
        self._newest: Decision | None = None
        self._heard_ns = 0
        self._moved: tuple[Decision, str] | None = None
        self._roles: dict[str, str] = {}
        self._tpot_ns: dict[str, int] = {}

    def take(self, decision: Decision, now_ns: int) -> None:
        if decision.action == ACTION_ROLE_MOVED:
            worker, role = decision.worker_id, role_name(decision.assignment)
            if self._moved is None or decision.decided_unix_ns >= self._moved[0].decided_unix_ns:
                self._moved = decision, self._roles.get(worker, "")
            if worker in self._roles or len(self._roles) < MAX_WORKERS:
                self._roles[worker] = role
            return
        if decision.action == ACTION_SET_LIMITS:
            return
        newest = self._newest
        if newest is None or decision.decided_unix_ns >= newest.decided_unix_ns:
            self._newest, self._heard_ns = decision, now_ns
            self._tpot_ns |= {each.model: each.tpot_ns for each in decision.targets if each.tpot_ns}
            self._tpot_ns = dict(list(self._tpot_ns.items())[-MAX_MODELS:])

    def tpot_ns(self, model: str, now_ns: int) -> int | None:
        """Return the TPOT target by which a live planner judges a model; None if there is none."""
        return self._tpot_ns.get(model) if now_ns - self._heard_ns < HEARD_NS else None

    def knows_role(self, worker: str, role: str) -> None:
        """Record a worker's role from telemetry, so that its next move is listed with the role that it leaves."""
        if worker not in self._roles and len(self._roles) < MAX_WORKERS:
            self._roles[worker] = role

    def status(self, now_ns: int) -> PlannerStatus:
        newest = self._newest
        heard = newest is not None and now_ns - self._heard_ns < HEARD_NS
        if newest is None:
            return PlannerStatus(False, None, None, False, "", None, "", "", self._last_move(now_ns))
        mode = Mode.Name(newest.mode).removeprefix("MODE_").lower() if newest.mode in Mode.values() else "unknown"
        reported = newest.action != ACTION_SET_MODE
        leads = newest.leads or not newest.HasField("leads")
        return PlannerStatus(
            heard=heard,
            mode=mode,
            leader=newest.planner_id[:MAX_TEXT] if heard and leads else None,
            acts=heard and leads and newest.mode == MODE_AUTO and not newest.idle_because,
            idle_because=newest.idle_because[:MAX_TEXT] if heard else "",
            decided_unix_ms=newest.decided_unix_ns // NS_PER_MS,
            reason=newest.reason[:MAX_TEXT] if reported else "",
            reason_code=newest.reason_code[:MAX_TEXT] if reported else "",
            last_move=self._last_move(now_ns),
        )

    def _last_move(self, now_ns: int) -> LastMove | None:
        if self._moved is None:
            return None
        moved, before = self._moved
        return LastMove(
            worker=moved.worker_id[:MAX_TEXT],
            from_role=before,
            to_role=role_name(moved.assignment),
            actor=moved.actor[:MAX_TEXT],
            reason=moved.reason[:MAX_TEXT],
            at_unix_ms=moved.decided_unix_ns // NS_PER_MS,
            age_ms=max(now_ns - moved.decided_unix_ns, 0) // NS_PER_MS,
        )
