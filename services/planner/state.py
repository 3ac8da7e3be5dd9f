"""What the planner knows: workers from the registry, their time from telemetry, and its last decisions."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from libs.contracts.pairing import unpaired
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, StepTime, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_RECOMMEND,
    ACTION_SET_LIMITS,
    ACTION_SET_MODE,
    MODE_AUTO,
    Action,
    Decision,
    Mode,
    Seen,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, StepBatch
from libs.policy.planner.cadence import is_news
from libs.policy.planner.limits import Limits
from libs.policy.planner.snapshot import ClusterSnapshot
from libs.telemetry.fleet import Fleet
from libs.telemetry.gateways import Gateways
from libs.telemetry.timeline import PrefillShares
from services.planner import messages
from services.planner.actions import Order
from services.planner.assigner import Assigner, ModelPlan
from services.planner.kept import Lead, mode_word
from services.planner.observe import ObservedWorker, by_hand, observe_worker, observed_cluster
from services.planner.observe_models import Heard, ObservedModel, observe_models

STALE_NS: Final = 3_000_000_000
"""Without news for this long, a source is taken to be away; what it said last stays in use."""
TPOT_NS: Final = 100_000_000
"""The gateways' own target."""
MEASURED_NS: Final = 2_000_000_000
"""After a decision, what it left is looked at and told."""
MAX_WATCHED: Final = 256
"""Decisions that wait to be looked at; the oldest go unmeasured."""
REPEATED: Final = frozenset((ACTION_KEEP, ACTION_RECOMMEND))
"""Decisions that say the same until something changes: of each run of them, the newest is kept."""


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who decides, and how far its decisions go."""

    planner_id: str
    incarnation: int
    mode: Mode


class Decided(NamedTuple):
    """What is published, and what is carried out."""

    decisions: Sequence[Decision]
    orders: Sequence[Order] = ()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A decision that changed workers, until it is looked at again."""

    due_ns: int
    decision: Decision
    before: Seen


class PlannerState:
    """Entered from the registry and the bus; time comes in as an argument."""

    def __init__(
        self,
        identity: Identity,
        prefill_shares: PrefillShares,
        *,
        lag_ns: int,
        window_ns: int,
        kept_decisions: int,
        tpot_ns: int = TPOT_NS,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.fleet = Fleet(prefill_shares)
        self.gateways = Gateways()
        self.workers: Sequence[Worker] = ()
        self.decisions: deque[Decision] = deque(maxlen=kept_decisions)
        self.told: Counter[Action] = Counter()
        """Decisions so far, by what they say was done."""
        self.started_ns = identity.incarnation
        self.lead = Lead.OURS
        """Whether it decides, of the planners that share its cluster; where nobody knows, it acts on nothing."""
        self.may_ask = True
        """Whether workers would do what it asks: not without the suite's token."""
        self.plans: Sequence[ModelPlan] = ()
        """What the last decision saw of each model."""
        self._kept: tuple[str, Action] | None = None
        """What the last decision said that left all as it is; None where workers were changed since."""
        self._kept_ns = 0
        self._watched: deque[_Watched] = deque(maxlen=MAX_WATCHED)
        self._lag_ns = lag_ns
        self._window_ns = window_ns
        self._tpot_ns = tpot_ns
        self._assigner = Assigner()
        self._heard: dict[str, Heard | None] = {}
        """Of each registered worker, its newest batch; None before there is one."""
        self._registry_ns: int | None = None
        self.at_rest = False
        """Whether the last decision was about a cluster in which nothing happened, and nothing has since."""

    def take_workers(self, workers: Sequence[Worker], now_ns: int) -> list[Decision]:
        """The registry's list, as it came at `now_ns`; the role moves that it shows, kept like decisions.

        A worker that is seen for the first time has not moved; of several moves between two lists the last one shows.
        """
        known = {(worker.id, worker.incarnation): worker.assignment.epoch for worker in self.workers}
        self.at_rest = self.at_rest and list(workers) == list(self.workers)
        self.workers = workers
        self._heard = {worker.id: self._heard.get(worker.id) for worker in workers}
        self._registry_ns = now_ns
        return [
            self._tell(messages.role_moved(worker), now_ns)
            for worker in workers
            if worker.assignment.epoch > known.get((worker.id, worker.incarnation), worker.assignment.epoch)
        ]

    def take_batch(self, batch: StepBatch, now_ns: int) -> None:
        """Telemetry of a worker that came at `now_ns`."""
        self.fleet.add(batch, now_ns)
        if batch.worker_id in self._heard:
            self._heard[batch.worker_id] = _heard(batch, now_ns)
        load = batch.load
        self.at_rest = self.at_rest and not (
            batch.steps.start_unix_ns or load.running or load.waiting or load.awaiting_kv
        )

    def take_queues(self, queues: GatewayQueues, now_ns: int) -> bool:
        """What waits at a gateway, as it came at `now_ns`; whether more waits than before."""
        before = self.gateways.waiting_tokens(now_ns)
        self.gateways.take(queues, now_ns)
        self.at_rest = self.at_rest and not queues.queues
        return self.gateways.waiting_tokens(now_ns) > before

    def set_mode(self, mode: Mode, actor: str, now_ns: int) -> Decision:
        """Decide from now on in this mode, or not at all; the change is kept like a decision."""
        self.identity = replace(self.identity, mode=mode)
        self._kept = None
        self.at_rest = False
        word = mode_word(mode)
        return self._tell(Decision(action=ACTION_SET_MODE, actor=actor, reason=f"{actor} set the mode: {word}"), now_ns)

    def take_mode(self, mode: Mode) -> None:
        """That of whoever led before, which has told of it."""
        self.identity = replace(self.identity, mode=mode)
        self._kept, self.at_rest = None, False

    def registry_age_ns(self, now_ns: int) -> int:
        """Since the registry answered; since the start when it never has."""
        return now_ns - (self.started_ns if self._registry_ns is None else self._registry_ns)

    def observed(self, now_ns: int) -> list[ObservedWorker]:
        """Each registered worker with its telemetry."""
        return [observe_worker(worker, self.fleet, now_ns - self._lag_ns, self._window_ns) for worker in self.workers]

    def snapshot(self, now_ns: int) -> ClusterSnapshot:
        """The cluster over the last window."""
        return observed_cluster(self.observed(now_ns), self._window_ns)

    def set_limits(self, limits: Limits, actor: str, said: str, now_ns: int) -> Decision:
        """Hold to these from now on; `said`: what has changed, in words. Kept like a decision."""
        self.limits = limits
        self.at_rest = False
        return self._tell(Decision(action=ACTION_SET_LIMITS, actor=actor, reason=f"{actor} set limits: {said}"), now_ns)

    def decide(self, now_ns: int) -> Decided:
        """Decide, and keep the decisions: one for the moves and one for the budgets of a model that is to change, else
        one to leave all as it is, which is told when its reasons change, and once a second."""
        observed = self._assigner.as_asked(self.observed(now_ns))
        snapshot = observed_cluster(observed, self._window_ns)
        self.at_rest = snapshot.at_rest
        acts = self.identity.mode == MODE_AUTO and self.lead is Lead.OURS and self.may_ask
        self.plans = self._assigner.decide(self._models(observed, now_ns), self.limits, now_ns, acts=acts)
        looked_at = self._look_again(now_ns)
        changing = [plan for plan in self.plans if plan.moves or plan.budgets]
        if acts and changing:
            decided = self._change(snapshot, changing, {each.worker.id: each for each in observed}, now_ns)
            return Decided([*looked_at, *decided.decisions], decided.orders)
        if changing:
            same = [messages.recommended(snapshot, plan, plan.assigned) for plan in changing if plan.assigned]
        else:
            same = [messages.kept(snapshot, self.plans)]
        return Decided([*looked_at, *self._tell_again(same, now_ns)])

    def done(self, order: Order, assignment: Assignment | None, failed: bool = False) -> None:
        """An order was carried out, and the worker has this now; or it was not. `failed`: it could not be asked."""
        self._assigner.done(order, assignment, failed=failed)

    def _models(self, observed: Sequence[ObservedWorker], now_ns: int) -> list[ObservedModel]:
        return observe_models(
            observed,
            {name: heard for name, heard in self._heard.items() if heard is not None},
            self.gateways.waiting(now_ns),
            tpot_ns=self._tpot_of,
            now_ns=now_ns,
            unpaired=unpaired(self.workers),
            pinned=self.limits.pinned | by_hand(self.workers, self.identity.planner_id, now_ns),
            planner_id=self.identity.planner_id,
        )

    def _tpot_of(self, model: str) -> int:
        """The target that a model's roles are decided for."""
        own_ms = self.limits.of(model).tpot_ms
        return self._tpot_ns if own_ms is None else round(own_ms * messages.NS_PER_MS)

    def _change(
        self, snapshot: ClusterSnapshot, plans: Sequence[ModelPlan], by_id: Mapping[str, ObservedWorker], now_ns: int
    ) -> Decided:
        """All changes, as they are told and as they are asked for."""
        self._kept = None
        told: list[Decision] = []
        asked: list[Order] = []
        for plan in plans:
            if plan.assigned is None:
                continue
            before = messages.seen(plan)
            for decision, changes in messages.changed(snapshot, plan, plan.assigned):
                orders = [self._assigner.order(each, by_id[each.worker_id], decision.reason) for each in changes]
                decision.changes.extend(messages.worker_changes(orders))
                told.append(self._tell(decision, now_ns))
                asked.extend(orders)
                if before is not None:
                    self._watched.append(_Watched(now_ns + MEASURED_NS, decision, before))
        return Decided(told, asked)

    def _look_again(self, now_ns: int) -> list[Decision]:
        """Decisions of a while ago, with what they left."""
        found = []
        by_model = {plan.observed.model: plan for plan in self.plans}
        while self._watched and self._watched[0].due_ns <= now_ns:
            watched = self._watched.popleft()
            plan = by_model.get(watched.decision.model)
            after = messages.seen(plan) if plan else None
            if after is not None:
                after_ms = (now_ns - watched.decision.decided_unix_ns) // messages.NS_PER_MS
                watched.decision.measured.CopyFrom(messages.measured(watched.before, after, after_ms))
                found.append(watched.decision)
        return found

    def _tell_again(self, decisions: Sequence[Decision], now_ns: int) -> list[Decision]:
        """Those that leave workers as they are, where there is news in them; the newest takes the last one's place."""
        last, code = self._kept, " ".join(f"{each.model} {each.reason_code}" for each in decisions)
        same = last is not None and last == (code, decisions[0].action)
        if not is_news(same_reasons=same, since_ns=now_ns - self._kept_ns):
            return []
        if same and len(decisions) == 1 and self.decisions and self.decisions[-1].action in REPEATED:
            self.decisions.pop()
        self._kept, self._kept_ns = (code, decisions[0].action), now_ns
        return [self._tell(each, now_ns) for each in decisions]

    def _tell(self, decision: Decision, now_ns: int) -> Decision:
        """Sign a decision and keep it."""
        self.told[decision.action] += 1
        decision.planner_id = self.identity.planner_id
        decision.incarnation = self.identity.incarnation
        decision.mode = self.identity.mode
        decision.sequence = sum(self.told.values())
        decision.decided_unix_ns = now_ns
        self.decisions.append(decision)
        return decision

    def not_live(self, now_ns: int) -> str | None:
        """What the planner does not hear of, in words; None when all is well."""
        reasons = []
        age_ns = self.registry_age_ns(now_ns)
        if self._registry_ns is None:
            reasons.append("the registry has not answered yet")
        elif age_ns > STALE_NS:
            reasons.append(f"the registry has been silent for {age_ns / 1e9:.1f} s: workers are those last known")
        if self.lead is Lead.UNKNOWN:
            reasons.append("Redis does not say which planner leads: decisions are told and not carried out")
        heard_ns = self.fleet.latest_arrival_ns or self.started_ns
        if self.workers and now_ns - heard_ns > STALE_NS:
            reasons.append(f"no telemetry has come for {(now_ns - heard_ns) / 1e9:.1f} s: the broker may be away")
        return "; ".join(reasons) or None


def _heard(batch: StepBatch, now_ns: int) -> Heard:
    if not batch.HasField("step_time"):
        return Heard(batch.incarnation, now_ns, None)
    step_time = StepTime()
    step_time.CopyFrom(batch.step_time)  # a part of a batch keeps all of it in memory
    return Heard(batch.incarnation, now_ns, step_time)
