"""The planner's state, from the registry, telemetry and its last decisions, and the loop that decides."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_RECOMMEND,
    ACTION_SET_LIMITS,
    ACTION_SET_MODE,
    ACTION_SET_ROLE,
    MODE_AUTO,
    MODE_OFF,
    Action,
    Decision,
    Measured,
    Mode,
    Seen,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads, GatewayQueues
from libs.contracts.topics import DECISIONS
from libs.policy.planner.groups import spread
from libs.policy.planner.hindsight import Replay, came, replayed
from libs.policy.planner.limits import PlannerLimits, is_due, is_news
from libs.policy.planner.role_planning import RolePlan
from libs.policy.planner.scaling import RoleWish
from libs.policy.planner.snapshot import ClusterSnapshot
from libs.policy.pressure import Workload, prompt_speed
from libs.policy.verdict.assessment import Assessment
from libs.runtime.clock import Clock
from libs.telemetry.assessments import FRESH_NS, assessments_of
from libs.telemetry.gateways import GatewayReports
from libs.telemetry.lives import LifeWatch, WorkerLife, newest_of
from services.planner import messages
from services.planner.executor import OrderExecutor
from services.planner.fleet_view import (
    FleetView,
    MessageOutcome,
    ObservedWorker,
    WorkerColumns,
    life_signs,
    observed_workers,
)
from services.planner.kept import Lead, LeaderLease, mode_word
from services.planner.observer import Look, ObservedCluster, Observer
from services.planner.regret import RegretLedger
from services.planner.role_planner import ModelPlan, Order, RolePlanner

# A source is reported as silent after this time without a report. Its last report remains in use.
STALE_NS: Final = 3_000_000_000
# The default TPOT target of gateways.
TPOT_NS: Final = 100_000_000
# The bound on the models whose targets are read from one message.
MAX_TARGETS: Final = 64
MAX_TARGET_NS: Final = 86_400_000_000_000
# The time between a decision and the measurement of its effect.
MEASURED_NS: Final = 2_000_000_000
# The bound on decisions that wait for measurement. Beyond it, the oldest are never measured.
MAX_WATCHED: Final = 256
# The interval between updates of workers' states.
LIVES_NS: Final = 200_000_000
# The actions of which only the latest decision in a run of identical ones is stored.
REPEATED: Final = frozenset((ACTION_KEEP, ACTION_RECOMMEND))


NO_LIMITS: Final = PlannerLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """The planner's name, incarnation and mode."""

    planner_id: str
    incarnation: int
    mode: Mode


class Decided(NamedTuple):
    """The decisions to publish and the orders to carry out."""

    decisions: Sequence[Decision]
    orders: Sequence[Order] = ()


@dataclass(slots=True)
class _MeasuredDecision:
    """A decision that changed workers, and whose effect has not been measured."""

    due_ns: int
    decision: Decision
    before: Seen
    seen: Workload
    """The workload up to which the replays have been advanced."""
    looked_ns: int
    replays: tuple[Replay, Replay] | None
    """The replays without and with a change of roles; None for other decisions."""


class PlannerState:
    """The planner's state, derived from the registry and the bus. Callers pass the time."""

    def __init__(
        self,
        identity: Identity,
        *,
        lag_ns: int,
        window_ns: int,
        kept_decisions: int,
        tpot_ns: int = TPOT_NS,
        limits: PlannerLimits = NO_LIMITS,
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.view = FleetView(window_ns, lag_ns)
        self.gateways = GatewayReports()
        self.decisions: deque[Decision] = deque(maxlen=kept_decisions)
        self.published: Counter[Action] = Counter()
        self.started_ns = identity.incarnation
        self._model_tpot_ms: Mapping[str, float] = {}
        self._requested_tpot_ns: Mapping[str, int] = {}
        """The usual TPOT target of each model's requests, as reported by metrics services."""
        self._requested_ttft_ns: Mapping[str, int] = {}
        """The strictest TTFT target that a tenth of each model's requests have."""
        self._assessments: tuple[int, Mapping[str, Assessment]] = 0, {}
        """The time at which a metrics service last published assessments, and the assessments by model."""
        self.lead = Lead.OURS
        """The holder of the leader lease. While it is unknown, this planner carries nothing out."""
        self.lead_fault = ""
        self.lead_term = 0
        """The number of this planner's lead, which workers check; 0 without a store."""
        self.may_ask = True
        """True if workers accept this planner's orders, which requires the suite's token."""
        self.ledger = RegretLedger()
        self.wishes: Mapping[str, RoleWish] = MappingProxyType({})
        """The number of workers of each model that should have a role, if there is an actuator."""
        self.plans: Sequence[ModelPlan] = ()
        """The plans of the last decision, one for each model."""
        self._kept: tuple[str, Action] | None = None
        """The reason codes and action of the last decision, if it changed no worker."""
        self._kept_ns = 0
        self._watched: deque[_MeasuredDecision] = deque(maxlen=MAX_WATCHED)
        self._lag_ns = lag_ns
        self._lives = LifeWatch()
        self._lives_ns: int | None = None
        self._tpot_ns = tpot_ns
        self._role_planner = RolePlanner()
        self._observer = Observer(self.view)
        self._registry_ns: int | None = None
        self.at_rest = False
        """True if nothing happened in the cluster at the last decision or since."""

    @property
    def workers(self) -> Sequence[Worker]:
        return self.view.roster.workers

    def take_workers(self, workers: Sequence[Worker], now_ns: int) -> list[Decision]:
        """Replace the list of workers. Return a recorded decision for each change of role in it.

        A worker that was not known before has not changed its role. If a role changed several times between two lists,
        only the last change is reported.
        """
        self._registry_ns = now_ns
        before = self.workers
        if list(workers) == list(before):
            return []
        known = {(worker.id, worker.incarnation): worker.assignment.epoch for worker in before}
        self.at_rest = False
        self._lives_ns = None
        self.view.take_roster(WorkerColumns(list(workers), self.identity.planner_id))
        return [
            self.record(messages.role_moved(worker), now_ns)
            for worker in workers
            if worker.assignment.epoch > known.get((worker.id, worker.incarnation), worker.assignment.epoch)
        ]

    def take_loads(self, loads: FleetLoads, now_ns: int) -> bool:
        """Record loads that were received at `now_ns`.

        Return whether more prompt tokens wait at workers than before.
        """
        before = self.view.waiting_prefill_tokens
        if self.view.take(loads, now_ns) is MessageOutcome.COUNTED:
            targets = loads.targets[:MAX_TARGETS]
            self._requested_tpot_ns = {
                each.model: each.tpot_ns for each in targets if 0 < each.tpot_ns <= MAX_TARGET_NS
            }
            self._requested_ttft_ns = {
                each.model: each.ttft_ns for each in targets if 0 < each.ttft_ns <= MAX_TARGET_NS
            }
            self._assessments = now_ns, assessments_of(loads.assessments)
        self.at_rest = self.at_rest and not self.view.works
        self.lives(now_ns)
        return self.view.waiting_prefill_tokens > before

    def take_queues(self, queues: GatewayQueues, now_ns: int) -> bool:
        """Record a gateway's queues that were received at `now_ns`. Return whether more tokens wait than before."""
        before = self.gateways.waiting_tokens(now_ns)
        self.gateways.take(queues, now_ns)
        self.at_rest = self.at_rest and not queues.queues
        return self.gateways.waiting_tokens(now_ns) > before

    def set_mode(self, mode: Mode, actor: str, now_ns: int) -> Decision:
        """Set the mode and record this as a decision."""
        self.identity = replace(self.identity, mode=mode)
        self._kept = None
        self.at_rest = False
        word = mode_word(mode)
        return self.record(
            Decision(action=ACTION_SET_MODE, actor=actor, reason=f"{actor} set the mode: {word}"), now_ns
        )

    def take_mode(self, mode: Mode) -> None:
        """Adopt the mode of the previous leader, which has already published it as a decision."""
        self.identity = replace(self.identity, mode=mode)
        self._kept, self.at_rest = None, False

    def registry_age_ns(self, now_ns: int) -> int:
        """Return the time since the registry last answered, or since the start if it never has."""
        return now_ns - (self.started_ns if self._registry_ns is None else self._registry_ns)

    def observed(self, now_ns: int) -> list[ObservedWorker]:
        """Return all registered workers with their telemetry."""
        return observed_workers(self.view, now_ns - self._lag_ns)

    def lives(self, now_ns: int) -> Mapping[str, WorkerLife]:
        """Return the states of all registered workers, which are updated at most once per `LIVES_NS`."""
        if self._lives_ns is None or not 0 <= now_ns - self._lives_ns < LIVES_NS:
            self._lives_ns = now_ns
            signs = life_signs(self.view)
            self._lives.look(signs, newest_of(signs.values()), now_ns)
        return self._lives.known

    def snapshot(self, now_ns: int) -> ClusterSnapshot:
        """Return the cluster's pools in the last window."""
        return self._observe({}, now_ns).snapshot

    def looked(self, now_ns: int) -> Sequence[ModelPlan]:
        """Return the plans of the last decision. In mode off, return those that a decision would make now."""
        if self.identity.mode != MODE_OFF:
            return self.plans
        plans = RolePlanner().decide(self._observe({}, now_ns).models, self.limits, now_ns, acts=False)
        return self._assessed(plans, now_ns)

    def _assessed(self, plans: Sequence[ModelPlan], now_ns: int) -> Sequence[ModelPlan]:
        """Add the latest assessments of metrics services, if they are fresh."""
        published_ns, found = self._assessments
        if now_ns - published_ns > FRESH_NS or not found:
            return plans
        # A data-parallel group counts as one worker here, but as its ranks in an assessment.
        return [
            replace(plan, assessment=None if plan.observed.ranks > 1 else found.get(plan.observed.model))
            for plan in plans
        ]

    def set_limits(self, limits: PlannerLimits, actor: str, said: str, now_ns: int) -> Decision:
        """Set the limits and record this as a decision. `said` describes the difference."""
        self.limits = limits
        self.at_rest = False
        return self.record(
            Decision(action=ACTION_SET_LIMITS, actor=actor, reason=f"{actor} set limits: {said}"), now_ns
        )

    def decide(self, now_ns: int) -> Decided:
        """Decide about every model and record the decisions.

        A model that changes gets one decision for each kind of change. If no model changes, one decision to keep
        everything is returned, once a second or when its reasons change.
        """
        observed = self._observe(self._role_planner.requested_assignments(self.view), now_ns)
        snapshot = observed.snapshot
        self.at_rest = snapshot.at_rest
        acts = self.identity.mode == MODE_AUTO and not self.idle_because
        plans = self._role_planner.decide(observed.models, self.limits, now_ns, acts=acts, wishes=self.wishes)
        self.plans = self._assessed(plans, now_ns)
        self.ledger.enter(self.plans, now_ns, acts=acts)
        looked_at = self._look_again(now_ns)
        changing = [plan for plan in self.plans if plan.moves or plan.budgets or plan.called or plan.strays]
        if acts and changing:
            decided = self._change(snapshot, changing, now_ns)
            return Decided([*looked_at, *decided.decisions], decided.orders)
        # In mode auto, the planner has decided against every move that it does not make, even if a verdict advises it.
        offered = () if acts else self.plans
        advised = [each for plan in offered if (each := messages.recommended(snapshot, plan)) is not None]
        same = advised or [messages.kept(snapshot, self.plans)]
        return Decided([*looked_at, *self._record_news(same, now_ns)])

    def done(self, order: Order, assignment: Assignment | None, now_ns: int, *, failed: bool = False) -> None:
        """Record the end of an order, and the worker's assignment after it.

        `failed` means that the worker could not be reached.
        """
        self._role_planner.done(order, assignment, now_ns, failed=failed)

    def _observe(self, requested_assignments: Mapping[str, Assignment], now_ns: int) -> ObservedCluster:
        pinned = self.view.roster.pinned(self.limits.pinned, now_ns)
        waiting = self.gateways.waiting(now_ns)
        look = Look(
            requested_assignments,
            waiting,
            self._tpot_of,
            pinned,
            now_ns,
            now_ns - self._lag_ns,
            self._requested_ttft_ns,
        )
        return self._observer.look(look)

    def take_model_targets(self, tpot_ms: Mapping[str, float]) -> None:
        """Replace the catalogue's TPOT targets, in ms by model."""
        self._model_tpot_ms = tpot_ms

    def _tpot_of(self, model: str) -> int:
        """Return the TPOT target for which a model's roles are decided.

        It is that of the limits, or else the usual one of the model's requests, the catalogue's, or the planner's own.
        Decisions contain it, and metrics services judge by the same target.
        """
        limit_ms = self.limits.of(model).tpot_ms
        if limit_ms is None and model in self._requested_tpot_ns:
            return self._requested_tpot_ns[model]
        own_ms = limit_ms or self._model_tpot_ms.get(model)
        return self._tpot_ns if own_ms is None else round(own_ms * messages.NS_PER_MS)

    def _change(self, snapshot: ClusterSnapshot, plans: Sequence[ModelPlan], now_ns: int) -> Decided:
        """Record the decisions for all models that change, and create their orders."""
        self._kept = None
        published: list[Decision] = []
        all_orders: list[Order] = []
        for plan in plans:
            if plan.assigned is None:
                continue
            before = messages.seen(plan)
            for decision, changes in messages.changed(snapshot, plan, plan.assigned):
                orders = [
                    self._role_planner.order(each, self.view, decision.reason, now_ns)
                    for each in spread(changes, self.view.roster.ranks)
                ]
                decision.changes.extend(messages.worker_changes(orders))
                published.append(self.record(decision, now_ns))
                all_orders.extend(orders)
                if before is not None:
                    self._watched.append(_watched(plan, plan.assigned, decision, before, now_ns))
        return Decided(published, all_orders)

    def _look_again(self, now_ns: int) -> list[Decision]:
        """Return earlier decisions whose effect has now been measured."""
        found = []
        by_model = {plan.observed.model: plan for plan in self.plans}
        for each in self._watched:
            if each.replays is not None and (known := by_model.get(each.decision.model)) is not None:
                _replay(each, known, now_ns)
        while self._watched and self._watched[0].due_ns <= now_ns:
            watched = self._watched.popleft()
            plan = by_model.get(watched.decision.model)
            after = messages.seen(plan) if plan else None
            if after is not None:
                after_ms = (now_ns - watched.decision.decided_unix_ns) // messages.NS_PER_MS
                measured = Measured(before=watched.before, after=after, after_ms=after_ms)
                watched.decision.measured.CopyFrom(measured)
                if watched.replays is not None:
                    watched.decision.counterfactual.CopyFrom(messages.counterfactual(*watched.replays))
                found.append(watched.decision)
        return found

    def _record_news(self, decisions: Sequence[Decision], now_ns: int) -> list[Decision]:
        """Record decisions that change no worker, if they are new.

        A decision that is identical to the last one replaces it.
        """
        last, code = self._kept, " ".join(f"{each.model} {each.reason_code}" for each in decisions)
        same = last is not None and last == (code, decisions[0].action)
        if not is_news(same_reasons=same, since_ns=now_ns - self._kept_ns):
            return []
        if same and len(decisions) == 1 and self.decisions and _is_repeated(self.decisions[-1]):
            self.decisions.pop()
        self._kept, self._kept_ns = (code, decisions[0].action), now_ns
        return [self.record(each, now_ns) for each in decisions]

    def record(self, decision: Decision, now_ns: int) -> Decision:
        """Sign and number a decision, and record it."""
        self.published[decision.action] += 1
        decision.planner_id = self.identity.planner_id
        decision.incarnation = self.identity.incarnation
        decision.mode = self.identity.mode
        decision.leads, decision.idle_because = self.lead is Lead.OURS, self.idle_because
        decision.sequence = sum(self.published.values())
        decision.decided_unix_ns = now_ns
        self.decisions.append(decision)
        return decision

    @property
    def idle_because(self) -> str:
        """The reason why nothing is carried out in mode auto; empty if it is, and in other modes."""
        if self.identity.mode != MODE_AUTO:
            return ""
        if self.lead is Lead.UNKNOWN:
            return f"nobody leads: {self.lead_fault or 'Redis has not said yet which planner does'}"
        if self.lead is Lead.ANOTHERS:
            return "another planner leads"
        return "" if self.may_ask else "it has no token that workers take: set FULCRUM_TOKEN or FULCRUM_TOKEN_FILE"

    def not_live(self, now_ns: int) -> str | None:
        """Return a description of all silent sources, or None if there are none."""
        reasons = []
        age_ns = self.registry_age_ns(now_ns)
        if self._registry_ns is None:
            reasons.append("the registry has not answered yet")
        elif age_ns > STALE_NS:
            reasons.append(f"the registry has been silent for {age_ns / 1e9:.1f} s: workers are those last known")
        if self.lead is Lead.UNKNOWN:
            fault = f" ({self.lead_fault})" if self.lead_fault else ""
            reasons.append(f"Redis does not say which planner leads{fault}: decisions are reported and not carried out")
        received_ns = self.view.latest_arrival_ns or self.started_ns
        if self.workers and now_ns - received_ns > STALE_NS:
            reasons.append(
                f"no telemetry has come for {(now_ns - received_ns) / 1e9:.1f} s: the broker or metrics may be away"
            )
        return "; ".join(reasons) or None


def _is_repeated(decision: Decision) -> bool:
    return decision.action in REPEATED and not (decision.HasField("advice") or decision.HasField("scale"))


def _watched(plan: ModelPlan, assigned: RolePlan, decision: Decision, before: Seen, now_ns: int) -> _MeasuredDecision:
    work, replays = plan.observed.work, None
    if decision.action == ACTION_SET_ROLE and plan.moves:
        without, then = (Replay(each.prefill, each.mixed, work.waiting_ns) for each in (assigned.now, assigned.then))
        replays = without, then
    return _MeasuredDecision(now_ns + MEASURED_NS, decision, before, work, now_ns, replays)


def _replay(watched: _MeasuredDecision, plan: ModelPlan, now_ns: int) -> None:
    """Advance both replays of a decision by the demand since they were last advanced."""
    engine, work, assigned = plan.observed.engine, plan.observed.work, plan.assigned
    if engine is None or assigned is None or watched.replays is None or now_ns <= watched.looked_ns:
        return
    speed = prompt_speed(engine, work, assigned.now.prefill, assigned.now.mixed)
    what = came(engine, watched.seen, work, speed, now_ns - watched.looked_ns)
    without, then = watched.replays
    watched.replays = replayed(without, what), replayed(then, what)
    watched.seen, watched.looked_ns = work, now_ns


LEAST_S: Final = 0.02
# After a decision, the loop rests for at least this many times the decision's duration, but at most for a period. This
# bounds the cost of decisions that reports trigger.
LEAST_REST: Final = 9


async def decide_forever(
    bus: Bus,
    state: PlannerState,
    clock: Clock,
    *,
    period_s: float,
    lease: LeaderLease,
    news: asyncio.Event,
    actor: OrderExecutor | None = None,
) -> None:
    """Decide and publish in every period while the mode is not off, and less often in a cluster at rest.

    `news` triggers a decision at once. A late round is not made up for. `actor` carries out orders in the background.
    """
    loop = asyncio.get_running_loop()
    due_s = decided_s = loop.time()
    rest_s = LEAST_S

    def done(order: Order, assignment: Assignment | None, failed: bool) -> None:
        state.done(order, assignment, clock.now_ns(), failed=failed)

    while True:
        began_s = loop.time()
        notified = news.is_set()
        news.clear()
        state.lead, state.lead_fault = lease.at(began_s), lease.fault
        decides = state.identity.mode != MODE_OFF and state.lead is not Lead.ANOTHERS
        due = is_due(at_rest=state.at_rest, since_s=began_s - decided_s, period_s=period_s)
        if decides and (due or notified):
            decided = state.decide(clock.now_ns())
            for decision in decided.decisions:
                bus.publish(DECISIONS, decision)
            if actor is not None:
                actor.carry_out(decided.orders, done, lead_term=state.lead_term)
            decided_s = began_s if decided.decisions else decided_s
            rest_s = min(max(LEAST_S, (loop.time() - began_s) * LEAST_REST), period_s)
        if loop.time() >= due_s:  # unless news arrived first
            due_s = max(due_s + period_s, loop.time())
        await asyncio.sleep(rest_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await news.wait()
