"""What the planner knows: workers from the registry, their time from telemetry, and its last decisions."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from libs.contracts.pairing import unpaired
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_UNSPECIFIED, Assignment, StepTime, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_ROLE_MOVED,
    ACTION_SET_BUDGET,
    ACTION_SET_MODE,
    ACTION_SET_ROLE,
    MODE_AUTO,
    Action,
    Alternative,
    ClusterSummary,
    Decision,
    Mode,
    PoolSummary,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, StepBatch
from libs.contracts.roles import role_name
from libs.policy.planner.moves import MAX_ALTERNATIVES, MoveLimits, MovePlan, decide
from libs.policy.planner.moves import Alternative as Weighed
from libs.policy.planner.snapshot import ClusterSnapshot
from libs.telemetry.fleet import Fleet
from libs.telemetry.gateways import Gateways
from libs.telemetry.timeline import PrefillShares
from services.planner.actions import Order
from services.planner.assigner import Assigner, ModelPlan
from services.planner.mode import mode_word
from services.planner.observe import ObservedWorker, observe_worker, observed_cluster
from services.planner.observe_models import Heard, ObservedModel, observe_models

STALE_NS: Final = 3_000_000_000
"""Without news for this long, a source is taken to be away; what it said last stays in use."""
TPOT_NS: Final = 100_000_000
"""The gateways' own target."""
MAX_UINT32: Final = 2**32 - 1
MAX_UINT64: Final = 2**64 - 1
"""What a decision can carry: sums over workers that each tell the most are cut there."""


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


class PlannerState:
    """Entered from the registry and the bus; time comes in as an argument."""

    def __init__(
        self,
        identity: Identity,
        limits: MoveLimits,
        prefill_shares: PrefillShares,
        *,
        lag_ns: int,
        window_ns: int,
        kept_decisions: int,
        tpot_ns: int = TPOT_NS,
    ) -> None:
        self.identity = identity
        self.fleet = Fleet(prefill_shares)
        self.gateways = Gateways()
        self.workers: Sequence[Worker] = ()
        self.decisions: deque[Decision] = deque(maxlen=kept_decisions)
        self.told: Counter[Action] = Counter()
        """Decisions so far, by what they say was done."""
        self.started_ns = identity.incarnation
        self._limits = limits
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
            self._tell(_role_moved(worker), now_ns)
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

    def take_queues(self, queues: GatewayQueues, now_ns: int) -> None:
        """What waits at a gateway, as it came at `now_ns`."""
        self.gateways.take(queues, now_ns)
        self.at_rest = self.at_rest and not queues.queues

    def set_mode(self, mode: Mode, actor: str, now_ns: int) -> Decision:
        """Decide from now on in this mode, or not at all; the change is kept like a decision."""
        self.identity = replace(self.identity, mode=mode)
        self.at_rest = False
        word = mode_word(mode)
        return self._tell(Decision(action=ACTION_SET_MODE, actor=actor, reason=f"{actor} set the mode: {word}"), now_ns)

    def registry_age_ns(self, now_ns: int) -> int:
        """Since the registry answered; since the start when it never has."""
        return now_ns - (self.started_ns if self._registry_ns is None else self._registry_ns)

    def observed(self, now_ns: int) -> list[ObservedWorker]:
        """Each registered worker with its telemetry."""
        return [observe_worker(worker, self.fleet, now_ns - self._lag_ns, self._window_ns) for worker in self.workers]

    def snapshot(self, now_ns: int) -> ClusterSnapshot:
        """The cluster over the last window."""
        return observed_cluster(self.observed(now_ns), self._window_ns)

    def decide(self, now_ns: int) -> Decided:
        """Decide, and keep the decisions: one a worker that is changed, else one to leave all as it is."""
        observed = self._assigner.as_asked(self.observed(now_ns))
        snapshot = observed_cluster(observed, self._window_ns)
        self.at_rest = snapshot.at_rest
        models = self._models(observed, now_ns)
        acts = self.identity.mode == MODE_AUTO
        plans = self._assigner.decide(models, now_ns, acts=acts)
        if acts and plans:
            by_id = {each.worker.id: each for each in observed}
            changed = [self._change(snapshot, plan, by_id) for plan in plans]
            decisions, orders = zip(*(each for of_plan in changed for each in of_plan), strict=True)
            return Decided([self._tell(each, now_ns) for each in decisions], orders)
        kept = _with_plans(decide(snapshot, self._limits), plans, models)
        return Decided([self._tell(decision_message(snapshot, kept), now_ns)])

    def done(self, order: Order, assignment: Assignment | None) -> None:
        """An order was carried out, and the worker has this now; or it was not."""
        self._assigner.done(order, assignment)

    def _models(self, observed: Sequence[ObservedWorker], now_ns: int) -> list[ObservedModel]:
        return observe_models(
            observed,
            {name: heard for name, heard in self._heard.items() if heard is not None},
            self.gateways.waiting(now_ns),
            tpot_ns=self._tpot_ns,
            now_ns=now_ns,
            unpaired=unpaired(self.workers),
        )

    def _change(
        self, snapshot: ClusterSnapshot, plan: ModelPlan, by_id: Mapping[str, ObservedWorker]
    ) -> Iterator[tuple[Decision, Order]]:
        """Each change of a plan as it is told and as it is asked for."""
        inputs = _summary(snapshot)
        alternatives = [Alternative(name=each.name, score=each.score) for each in plan.alternatives]
        for change, reason in plan.changes:
            observed = by_id[change.worker_id]
            order = self._assigner.order(change, observed, reason)
            moved = order.wanted.role != observed.assignment.role
            decision = Decision(
                action=ACTION_SET_ROLE if moved else ACTION_SET_BUDGET,
                reason=reason,
                inputs=inputs,
                alternatives=alternatives,
                worker_id=change.worker_id,
                worker_incarnation=observed.worker.incarnation,
                assignment=order.wanted,
            )
            yield decision, order

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
        heard_ns = self.fleet.latest_arrival_ns or self.started_ns
        if self.workers and now_ns - heard_ns > STALE_NS:
            reasons.append(f"no telemetry has come for {(now_ns - heard_ns) / 1e9:.1f} s: the broker may be away")
        return "; ".join(reasons) or None


def _role_moved(worker: Worker) -> Decision:
    change, role = worker.role_change, role_name(worker.assignment)
    actor = change.actor or "somebody"
    return Decision(
        action=ACTION_ROLE_MOVED,
        reason=f"{actor} moved {worker.id} to {role}: {change.reason or 'no reason given'}",
        actor=actor,
        worker_id=worker.id,
        worker_incarnation=worker.incarnation,
        assignment=worker.assignment,
    )


def decision_message(snapshot: ClusterSnapshot, plan: MovePlan) -> Decision:
    """What was decided from what, before it is signed."""
    return Decision(
        action=f"ACTION_{plan.action.name}",
        reason=plan.reason,
        inputs=_summary(snapshot),
        alternatives=[Alternative(name=each.name, score=each.score) for each in plan.alternatives],
    )


def _summary(snapshot: ClusterSnapshot) -> ClusterSummary:
    return ClusterSummary(
        coverage=snapshot.coverage,
        window_ms=snapshot.window_ms,
        pools=[
            PoolSummary(
                model=pool.model,
                role=ROLE_UNSPECIFIED if pool.role is None else f"ROLE_{pool.role.name}",
                workers=len(pool.workers),
                gpus=min(pool.gpus, MAX_UINT32),
                busy=pool.busy,
                running=min(pool.running, MAX_UINT32),
                waiting=min(pool.waiting, MAX_UINT32),
                waiting_prefill_tokens=min(pool.waiting_prefill_tokens, MAX_UINT64),
            )
            for pool in snapshot.pools
        ],
    )


def _with_plans(kept: MovePlan, plans: Sequence[ModelPlan], models: Sequence[ObservedModel]) -> MovePlan:
    """A decision to keep, with what would be done in mode auto, and of which models nobody knows enough for that."""
    said = [f"In mode auto, {plan.model}: {'; '.join(plan.reasons)}" for plan in plans]
    said += [
        f"Roles of {each.model} stay: {each.unknown}" for each in models if each.unknown and len(each.standings) > 1
    ]
    alternatives = kept.alternatives
    if plans:
        named = [Weighed(f"{plan.model}: {each.name}", each.score) for plan in plans for each in plan.alternatives]
        alternatives = (*kept.alternatives[:1], *named[:MAX_ALTERNATIVES])
    return replace(kept, reason=". ".join([kept.reason, *said]), alternatives=alternatives)


def _heard(batch: StepBatch, now_ns: int) -> Heard:
    if not batch.HasField("step_time"):
        return Heard(batch.incarnation, now_ns, None)
    step_time = StepTime()
    step_time.CopyFrom(batch.step_time)  # a part of a batch keeps all of it in memory
    return Heard(batch.incarnation, now_ns, step_time)


def action_word(action: Action) -> str:
    """keep, set_role, set_budget, ... or unknown."""
    return Action.Name(action).removeprefix("ACTION_").lower() if action in Action.values() else "unknown"
