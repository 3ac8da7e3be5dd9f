"""Conversion of decisions to their published messages. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_UNSPECIFIED, Assignment, ModelTarget, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_RECOMMEND,
    ACTION_ROLE_MOVED,
    ACTION_SET_BUDGET,
    ACTION_SET_ROLE,
    Action,
    Alternative,
    Candidate,
    ClusterSummary,
    Counterfactual,
    Decision,
    PoolSummary,
    Replayed,
    Seen,
    WorkerChange,
)
from libs.contracts.roles import role_name
from libs.policy.planner.hindsight import METHOD, Replay
from libs.policy.planner.outlook import outlook
from libs.policy.planner.role_planning import MAX_CANDIDATES, RoleOrder, RolePlan
from libs.policy.planner.snapshot import ClusterSnapshot
from libs.policy.pressure.splits import Split, WorkerProfile, Workload
from services.planner.orders import Order
from services.planner.reasons import (
    MAX_PRESSURE,
    why_advised,
    why_budgets,
    why_called,
    why_kept,
    why_moved,
    why_together,
)
from services.planner.role_planner import ModelPlan

MAX_UINT32: Final = 2**32 - 1
# Sums over workers that each report the maximum are cut to what a message can carry.
MAX_UINT64: Final = 2**64 - 1
NS_PER_MS: Final = 1_000_000
CODE_NOBODY: Final = "no_workers"
# Too little is known about a model to decide about it.
CODE_UNKNOWN: Final = "unknown"


def kept(snapshot: ClusterSnapshot, plans: Sequence[ModelPlan]) -> Decision:
    candidates = [each for plan in plans[:1] for each in _candidates(plan)]
    return Decision(
        action=ACTION_KEEP,
        reason=why_kept(plans),
        reason_code=" ".join(dict.fromkeys(map(_code, plans))) or CODE_NOBODY,
        inputs=summary(snapshot),
        candidates=candidates,
        alternatives=_named(candidates),
        targets=[_target(plan) for plan in plans],
    )


def changed(
    snapshot: ClusterSnapshot, plan: ModelPlan, assigned: RolePlan
) -> list[tuple[Decision, Sequence[RoleOrder]]]:
    """Return a plan's changes in mode auto, one decision for each kind: roles first, budgets last."""
    found = []
    for action, changes, why in (
        (ACTION_SET_ROLE, plan.moves, why_moved),
        (ACTION_SET_ROLE, plan.called, why_called),
        (ACTION_SET_ROLE, plan.strays, why_together),
        (ACTION_SET_BUDGET, plan.budgets, why_budgets),
    ):
        if changes:
            found.append((_about(action, snapshot, plan, assigned, why(plan, assigned)), changes))
    return found


def recommended(snapshot: ClusterSnapshot, plan: ModelPlan, assigned: RolePlan) -> Decision:
    """Return a decision that recommends what mode auto would do."""
    reason = f"In mode auto it would act: {why_advised(plan, assigned)}"
    decision = _about(ACTION_RECOMMEND, snapshot, plan, assigned, reason)
    decision.changes.extend(
        WorkerChange(worker_id=each.worker_id, assignment=_assignment(plan.observed.model, each))
        for each in (*plan.moves, *plan.called, *plan.strays, *plan.budgets)
    )
    return decision


def worker_changes(orders: Iterable[Order]) -> list[WorkerChange]:
    """Return the message form of orders, in the order they are sent."""
    return [
        WorkerChange(
            worker_id=each.worker.id,
            worker_incarnation=each.worker.incarnation,
            assignment=each.wanted,
            before=each.before or each.worker.assignment,
        )
        for each in orders
    ]


def role_moved(worker: Worker) -> Decision:
    """Return a decision which reports that a worker was seen in another role, whoever set it."""
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


def seen(plan: ModelPlan) -> Seen | None:
    """Return a model's present state for a later comparison, or None if too little is known."""
    if plan.assigned is None:
        return None
    now, work = plan.assigned.now, plan.observed.work
    return Seen(
        prefill=now.prefill,
        decode=now.mixed,
        prompt_pressure=min(now.prompt_pressure, MAX_PRESSURE),
        decode_pressure=min(now.decode_pressure, MAX_PRESSURE),
        waiting_ms=work.waiting_ns / NS_PER_MS,
        decodes=min(work.decodes, MAX_UINT32),
    )


def counterfactual(without: Replay, then: Replay) -> Counterfactual:
    """Return what the demand since a decision would have met without it and with it."""
    over_ms = without.lasted_ns // NS_PER_MS
    return Counterfactual(method=METHOD, over_ms=over_ms, without=_replayed(without), **{"with": _replayed(then)})


def _replayed(replay: Replay) -> Replayed:
    mean = replay.mean()
    return Replayed(
        prefill=mean.prefill, decode=mean.mixed, ttft_ms=mean.ttft_ns / NS_PER_MS, tpot_ms=mean.tpot_ns / NS_PER_MS,
        served=mean.served,
    )  # fmt: skip


def summary(snapshot: ClusterSnapshot) -> ClusterSummary:
    """Return the pools that a decision was based on."""
    return ClusterSummary(
        coverage=snapshot.coverage,
        window_ms=snapshot.window_ms,
        pools=[
            PoolSummary(
                model=pool.model,
                role=ROLE_UNSPECIFIED if pool.role is None else f"ROLE_{pool.role.name}",
                workers=pool.workers,
                gpus=min(pool.gpus, MAX_UINT32),
                busy=pool.busy,
                running=min(pool.running, MAX_UINT32),
                waiting=min(pool.waiting, MAX_UINT32),
                waiting_prefill_tokens=min(pool.waiting_prefill_tokens, MAX_UINT64),
            )
            for pool in snapshot.pools
        ],
    )


def action_word(action: Action) -> str:
    """Return an action as users see it, such as keep or set_role; unknown for one of a later release."""
    return Action.Name(action).removeprefix("ACTION_").lower() if action in Action.values() else "unknown"


def _about(action: Action, snapshot: ClusterSnapshot, plan: ModelPlan, assigned: RolePlan, reason: str) -> Decision:
    candidates = _candidates(plan)
    return Decision(
        action=action,
        reason=reason,
        reason_code=assigned.code.value,
        model=plan.observed.model,
        inputs=summary(snapshot),
        candidates=candidates,
        alternatives=_named(candidates),
        targets=[_target(plan)],
    )


def _target(plan: ModelPlan) -> ModelTarget:
    return ModelTarget(model=plan.observed.model, tpot_ns=plan.observed.work.tpot_ns)


def _code(plan: ModelPlan) -> str:
    return plan.assigned.code.value if plan.assigned else CODE_UNKNOWN


def _named(candidates: Iterable[Candidate]) -> list[Alternative]:
    """Return candidates by name with the pressure of their worse phase."""
    return [
        Alternative(
            name=f"{each.prefill} prefill, {each.decode} decode" if each.prefill else f"{each.decode} that do both",
            score=max(each.prompt_pressure, each.decode_pressure),
        )
        for each in candidates
    ]


def _candidates(plan: ModelPlan) -> list[Candidate]:
    """Return the chosen split, the present one, then the others by cost."""
    engine, work, assigned = plan.observed.engine, plan.observed.work, plan.assigned
    if engine is None or assigned is None:
        return []
    chosen = dict.fromkeys((assigned.then, assigned.now, *assigned.candidates[:MAX_CANDIDATES]))
    return [_candidate(engine, work, each) for each in list(chosen)[:MAX_CANDIDATES]]


def _candidate(engine: WorkerProfile, work: Workload, split: Split) -> Candidate:
    predicted = outlook(engine, work, split)
    return Candidate(
        prefill=split.prefill,
        decode=split.mixed,
        prompt_pressure=min(split.prompt_pressure, MAX_PRESSURE),
        decode_pressure=min(split.decode_pressure, MAX_PRESSURE),
        ttft_ms=predicted.ttft_ns / NS_PER_MS,
        tpot_ms=predicted.tpot_ns / NS_PER_MS,
        served=predicted.served,
    )


def _assignment(model: str, change: RoleOrder) -> Assignment:
    return Assignment(model=model, role=f"ROLE_{change.role.name}", budget_tokens=change.budget_tokens)
