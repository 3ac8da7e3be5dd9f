"""The loop that moves workers of an observed fleet between prefill and decode, one at a time.

It decides by the rules of libs/policy/planner and publishes decisions as a planner does, so that status, page and
events show them. After an error it pauses: it publishes the reason, and reads the fleet again at growing intervals.
While another process has the fleet's lease it only advises, and names that process.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from google.protobuf.message import Message

from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_ROLE_MOVED,
    ACTION_SET_MODE,
    ACTION_SET_ROLE,
    MODE_AUTO,
    Candidate,
    Decision,
    Measured,
    Seen,
    WorkerChange,
)
from libs.contracts.roles import role_from_name
from libs.contracts.topics import AUDIT, DECISIONS, Topic
from libs.observe.roles import ActingLease, FleetAway, FleetRoles, FleetWorker, MoveRefused
from libs.policy.foreign_moves import (
    UNMEASURED_FOREIGN,
    ForeignMove,
    plan_move,
    why_kept,
    withheld,
    without_move,
)
from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.role_planning import Memory, MoveEvidence, RolePlan
from libs.policy.pressure import MAX_PRESSURE, Split
from libs.policy.verdict.state import ModelState, WorkerState
from libs.runtime.clock import Clock
from services.metrics.status.evaluator import FRESH_NS, StatusLook

log = structlog.get_logger()

PLANNER: Final = "observe"
"""The name of the actor in decisions and in the audit trail."""
STEP_S: Final = 1.0
READ_NS: Final = 10_000_000_000
"""The time between two reads of the fleet while nothing moves."""
FIRST_PAUSE_NS: Final = 5_000_000_000
LONGEST_PAUSE_NS: Final = 300_000_000_000
"""The bounds of the pause after an error, which doubles each time."""
SHOWN_NS: Final = 30_000_000_000
"""The time within which telemetry must show a move."""
MAX_MODELS: Final = 64
MAX_FIXED: Final = 4
"""The maximum number of fixed workers that a decision's reason names."""
MAX_WHY: Final = 400
OK, REFUSED, AWAY = 200, 409, 503
Publish = Callable[[Topic, Message], None]


@dataclass(slots=True)
class _MadeMove:
    """A move whose effect is still to be measured."""

    move: ForeignMove
    decision: Decision
    before: Seen
    made_ns: int
    shown: bool = False


class RoleActor:
    """The actor of one fleet. `step` decides and acts once."""

    def __init__(
        self,
        roles: FleetRoles,
        seen: Callable[[], StatusLook | None],
        publish: Publish,
        clock: Clock,
        *,
        lease: ActingLease,
        limits: ModelLimits,
        rest_ns: int,
        on_read: Callable[[Mapping[str, str]], None] = lambda roles: None,
    ) -> None:
        """Create an actor. `seen` returns the last evaluation of the verdict. Two moves are at least `rest_ns` apart.

        `on_read` receives the roles by name after each read, for telemetry without any other source of them.
        """
        self._roles = roles
        self._seen = seen
        self._publish = publish
        self._clock = clock
        self._lease = lease
        self._holder = ""
        """The name of the process that acts instead of this one; empty if there is none."""
        self._limits = limits
        self._rest_ns = rest_ns
        self._on_read = on_read
        self._began_ns = clock.now_ns()
        self._sequence = 0
        self._memories: dict[str, Memory] = {}
        self._evidence: MoveEvidence = UNMEASURED_FOREIGN
        self._fleet: Mapping[str, FleetWorker] = {}
        self._read_ns = 0
        self._moved_ns = 0
        self._made: _MadeMove | None = None
        self._until_ns = self._pause_ns = self._withheld_until_ns = 0
        self.still_because = "the roles of the fleet have not been read yet"
        """The reason why nothing moves; empty if due moves are made."""

    async def begin(self) -> None:
        """Read the fleet once. Raise StartupError if its roles, or who acts on it, cannot be read."""
        try:
            await self._read()
            holder = await self._lease.hold()
        except FleetAway as error:
            raise StartupError(f"--act: {plain(str(error))}") from None
        self.still_because = ""
        if holder:
            self._stand_by(holder, self._clock.now_ns())

    async def run(self) -> None:
        """Step until cancelled."""
        self._publish_decision(
            Decision(action=ACTION_SET_MODE, actor=PLANNER, reason=f"observe changes roles through {self._roles.kind}"),
            self._clock.now_ns(),
        )
        while True:
            await self.step()
            await asyncio.sleep(STEP_S)

    async def step(self) -> None:
        """Read the fleet if that is due, decide about each model, and make at most one move."""
        now_ns = self._clock.now_ns()
        if not await self._is_read(now_ns):
            self._keep(self.still_because, now_ns)
            return
        states = self._states(now_ns)
        self._measure(states, now_ns)
        if now_ns < self._until_ns or not await self._leads(now_ns):
            self._keep(self.still_because, now_ns)
            return
        reasons, move = [], None
        for state in states:
            plan, found = self._decide(state, now_ns, may_move=move is None and self._may_move(now_ns))
            reasons.append(why_kept(state.model, plan))
            move = move or found
        if move is None:
            self._go_on(now_ns)
            self._keep("; ".join(reasons) or "no model is known well enough to decide", now_ns)
        else:
            await self._make(move, next(each for each in states if each.model == move.model), now_ns)

    def _states(self, now_ns: int) -> list[ModelState]:
        seen = self._seen()
        if seen is None or now_ns - seen.at_ns > FRESH_NS:
            return []
        return [each for each in seen.models if isinstance(each, ModelState) and not each.roles_fixed][:MAX_MODELS]

    def _may_move(self, now_ns: int) -> bool:
        rested = not self._moved_ns or now_ns - self._moved_ns >= self._rest_ns
        return self._made is None and rested and now_ns >= self._withheld_until_ns

    def _decide(self, state: ModelState, now_ns: int, *, may_move: bool) -> tuple[RolePlan, ForeignMove | None]:
        before = self._memories.get(state.model, Memory())
        fixed = {each.id for each in state.workers if not self._is_movable(each)}
        plan, move = plan_move(
            state, fixed, before, now_ns, limits=self._limits, may_move=may_move, evidence=self._evidence
        )
        if state.model in self._memories or len(self._memories) < MAX_MODELS:
            self._memories[state.model] = plan.memory if move is None else without_move(plan.memory, before)
        return plan, move

    def _is_movable(self, worker: WorkerState) -> bool:
        known = self._fleet.get(worker.id)
        # A role just changed by somebody else reaches telemetry a moment later.
        return known is not None and known.ready and not known.fixed_because and known.role == worker.takes

    # ------------------------------------------------------------ the fleet

    async def _is_read(self, now_ns: int) -> bool:
        """Read the fleet if that is due. Return False while paused, or if this read fails."""
        if now_ns < self._until_ns:
            return False
        if (self.still_because and not self._holder) or now_ns - self._read_ns >= READ_NS:
            try:
                await self._read()
            except FleetAway as error:
                self._stand_still(str(error), now_ns)
                return False
        return True

    async def _leads(self, now_ns: int) -> bool:
        """Return whether this process may act. If another process may, record its name."""
        try:
            holder = await self._lease.hold()
        except FleetAway as error:
            self._stand_still(str(error), now_ns)
            return False
        if holder:
            if self.still_because != _advises(holder):
                self._stand_by(holder, now_ns)
            return False
        if self._holder:
            self._holder = ""
            self._moved_ns = now_ns  # the other process may just have made a move
            self._memories.clear()
            self._go_on(now_ns)
        return True

    def _stand_by(self, holder: str, now_ns: int) -> None:
        self._holder, self._made, self._pause_ns = holder, None, 0
        self.still_because = _advises(holder)
        log.warning("another process changes the roles of this fleet", holder=holder)
        self._publish_decision(Decision(action=ACTION_SET_MODE, actor=PLANNER, reason=self.still_because), now_ns)

    def _go_on(self, now_ns: int) -> None:
        """End the pause after a move was made or none is due."""
        if self.still_because:
            self.still_because, self._pause_ns = "", 0
            self._publish_decision(
                Decision(action=ACTION_SET_MODE, actor=PLANNER, reason="observe changes roles again"), now_ns
            )

    async def _read(self) -> None:
        self._fleet = {each.name: each for each in await self._roles.workers()}
        self._read_ns = self._clock.now_ns()
        self._on_read({each.name: each.role for each in self._fleet.values()})

    def _stand_still(self, why: str, now_ns: int, least_ns: int = FIRST_PAUSE_NS) -> None:
        self._pause_ns = min(max(2 * self._pause_ns, least_ns), LONGEST_PAUSE_NS)
        self._until_ns = now_ns + self._pause_ns
        why = plain(why)[:MAX_WHY]
        if why != self.still_because:
            self.still_because = why
            log.warning("role moves paused", reason=why)
            reason = f"observe has paused role moves: {why}"
            self._publish_decision(Decision(action=ACTION_SET_MODE, actor=PLANNER, reason=reason), now_ns)

    # ------------------------------------------------------------ a move

    async def _make(self, move: ForeignMove, state: ModelState, now_ns: int) -> None:
        """Make a move unless the fleet's present roles forbid it, and record its outcome."""
        try:
            await self._read()
            names = {each.id for each in state.workers}
            roles = {each.name: each.role for each in self._fleet.values() if each.ready and each.name in names}
            if why := withheld(move, roles, self._limits):
                self._withheld_until_ns = now_ns + FIRST_PAUSE_NS
                self._keep(f"{state.model}: no move, since {why}", now_ns)
                return
            if not await self._leads(now_ns):
                return
            await self._roles.set_role(self._fleet[move.worker], move.role, move.why)
        except MoveRefused as error:
            self._audit(move, REFUSED, str(error), now_ns)
            self._stand_still(str(error), now_ns)
            return
        except FleetAway as error:
            self._audit(move, AWAY, str(error), now_ns)
            self._stand_still(str(error), now_ns)
            return
        self._go_on(now_ns)
        self._pause_ns = 0
        self._memories[state.model] = move.plan.memory
        self._moved_ns, self._read_ns = now_ns, 0
        self._audit(move, OK, move.why, now_ns)
        decision = self._publish_decision(_set_role(move), now_ns)
        self._publish_decision(_role_moved(move), now_ns)
        self._made = _MadeMove(move, decision, _seen(move.plan.now, state), now_ns)
        log.info("role moved", worker=move.worker, role=move.role, reason=move.why)

    def _measure(self, states: Iterable[ModelState], now_ns: int) -> None:
        """Follow the last move until telemetry shows it, then until its effect can be measured."""
        made = self._made
        if made is None:
            return
        state = next((each for each in states if each.model == made.move.model), None)
        role = {each.id: each.takes for each in state.workers}.get(made.move.worker) if state is not None else None
        if not made.shown and role == made.move.role:
            made.shown = True
            self._evidence = self._evidence.measured(now_ns - made.made_ns)
        if not made.shown and now_ns - made.made_ns >= SHOWN_NS:
            self._made = None
            why = f"{made.move.worker} was moved to {made.move.role}, but its telemetry does not show it"
            self._stand_still(why, now_ns, LONGEST_PAUSE_NS)
            return
        paid_ns = max(made.move.plan.memory.paid_ns.values(), default=0)
        if made.shown and state is not None and now_ns >= paid_ns:
            self._made = None
            prompts, decodes = state.pressures.prefill, state.pressures.decode
            after = _seen(Split(round(state.standing.prefill), round(state.standing.mixed), prompts, decodes), state)
            after_ms = (now_ns - made.made_ns) // 1_000_000
            made.decision.measured.CopyFrom(Measured(before=made.before, after=after, after_ms=after_ms))
            self._publish(DECISIONS, made.decision)

    # ------------------------------------------------------------ publishing

    def _keep(self, why: str, now_ns: int) -> None:
        fixed = [each for each in self._fleet.values() if each.fixed_because]
        if fixed and not self.still_because:
            named = "; ".join(f"{each.name}: {each.fixed_because}" for each in fixed[:MAX_FIXED])
            more = f"; and {len(fixed) - MAX_FIXED} more" if len(fixed) > MAX_FIXED else ""
            why = f"{why}. Fixed: {plain(named)}{more}"
        self._publish_decision(Decision(action=ACTION_KEEP, reason=why), now_ns)

    def _publish_decision(self, decision: Decision, now_ns: int) -> Decision:
        self._sequence += 1
        decision.planner_id, decision.incarnation, decision.sequence = PLANNER, self._began_ns, self._sequence
        decision.decided_unix_ns, decision.mode = now_ns, MODE_AUTO
        decision.leads, decision.idle_because = True, self.still_because
        self._publish(DECISIONS, decision)
        return decision

    def _audit(self, move: ForeignMove, status: int, detail: str, now_ns: int) -> None:
        self._publish(AUDIT, AuditEvent(
            event_id=f"{PLANNER}-{self._began_ns}-{now_ns}", at_unix_ns=now_ns, service="metrics", actor=PLANNER,
            action=f"role {move.worker} {move.role}", detail=plain(detail), status=status,
        ))  # fmt: skip


def _advises(holder: str) -> str:
    return f"{plain(holder)} acts on this fleet, and this process advises"[:MAX_WHY]


def _assignment(model: str, role: str) -> Assignment:
    number, _ = role_from_name(role)
    return Assignment(model=model, role=number)


def _set_role(move: ForeignMove) -> Decision:
    splits: Sequence[Split] = (move.plan.then, move.plan.now)
    change = WorkerChange(
        worker_id=move.worker,
        assignment=_assignment(move.model, move.role),
        before=_assignment(move.model, move.before),
    )
    return Decision(
        action=ACTION_SET_ROLE,
        model=move.model,
        reason=move.why,
        reason_code=move.plan.code.value,
        changes=[change],
        candidates=[
            Candidate(
                prefill=each.prefill,
                decode=each.mixed,
                prompt_pressure=min(each.prompt_pressure, MAX_PRESSURE),
                decode_pressure=min(each.decode_pressure, MAX_PRESSURE),
            )
            for each in splits
        ],
    )


def _role_moved(move: ForeignMove) -> Decision:
    return Decision(
        action=ACTION_ROLE_MOVED,
        reason=f"{PLANNER} moved {move.worker} to {move.role}: {move.why}",
        actor=PLANNER,
        worker_id=move.worker,
        assignment=_assignment(move.model, move.role),
    )


def _seen(split: Split, state: ModelState) -> Seen:
    return Seen(
        prefill=split.prefill,
        decode=split.mixed,
        prompt_pressure=min(split.prompt_pressure, MAX_PRESSURE),
        decode_pressure=min(split.decode_pressure, MAX_PRESSURE),
        waiting_ms=state.work.waiting_ns / 1e6,
        decodes=state.work.decodes,
    )
