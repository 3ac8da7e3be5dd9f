"""The planner's messages: decisions, their reasons in words, and their measured effects."""

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
from libs.contracts.roles import NO_REASON, role_from_name, role_name
from libs.policy.planner.due import LEAST_DUE_NS
from libs.policy.planner.hindsight import METHOD, Replay, outlook
from libs.policy.planner.role_planning import (
    CALM_NS,
    DECODES_PRESS,
    LOWER,
    MAX_CANDIDATES,
    PROMPTS_PRESS,
    RAISE,
    STARTING_NS,
    RoleOrder,
    RolePlan,
    RoleReason,
)
from libs.policy.planner.snapshot import ClusterSnapshot
from libs.policy.pressure import MAX_PRESSURE, Split, WorkerProfile, Workload, figure, split
from libs.policy.roles import Role
from libs.policy.verdict.assessment import Assessment
from libs.policy.verdict.causes import workers
from services.planner.role_planner import ModelPlan, Order

# The predicted TTFT from which on a reason mentions it.
LONG_MS: Final = 1_000


def why_moved(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reason for a change of roles."""
    now, then = plan.shown_now(assigned), plan.shown(assigned.then, lending=not assigned.memory.apart.on)
    to_prefill = sum(change.role is Role.PREFILL for change in plan.moves)
    count, (leave, take) = len(plan.moves), ("decode", "prefill") if to_prefill else ("prefill", "decode")
    way = f"moving {workers(count, leave)} to {take}"
    leaves = f"{way} leaves a pressure of {figure(then.pressure)}"
    if assigned.code is RoleReason.LIMITS:
        there = f"{workers(assigned.now.prefill, 'prefill')} and {assigned.now.mixed} decode"
        return f"limits ask for other numbers than {there}; {leaves}"
    # The planner also moves workers ahead of a queue. The assessment shows no pressure then, because it needs some
    # seconds to measure a rate.
    if assigned.code is RoleReason.DECODES_PRESS:
        if now.decode_pressure < DECODES_PRESS:
            return f"sequences gather on {workers(now.mixed, 'decode')}; {way} before pressure rises"
        return f"decode pressure {figure(now.decode_pressure)} on {workers(now.mixed, 'decode')}; {leaves}"
    waits = _waits(plan, assigned.now)
    if now.prompt_pressure < PROMPTS_PRESS:
        return f"a queue of prompts begins on {workers(now.prefill, 'prefill')}{waits}; {way} before pressure rises"
    return f"prefill pressure {figure(now.prompt_pressure)} on {workers(now.prefill, 'prefill')}{waits}; {leaves}"


def why_called(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reason for which spare workers take a role or return to standby."""
    up = [each for each in plan.called if each.role is not Role.STANDBY]
    if up:
        pressure, there = plan.shown_now(assigned).pressure, assigned.now.prefill + assigned.now.mixed
        prefill = sum(each.role is Role.PREFILL for each in up)
        take = "takes a role" if len(up) == 1 else "take roles"
        return (
            f"a pressure of {figure(pressure)} on {there} workers;"
            f" {workers(len(up), 'spare')} {take}: {prefill} prefill, {len(up) - prefill} decode"
        )
    go = "goes" if len(plan.called) == 1 else "go"
    return f"fewer workers are needed: {workers(len(plan.called), 'spare')} {go} back to standby"


def why_together(plan: ModelPlan, _assigned: RolePlan) -> str:
    """Return the reason for which ranks take the role of their group."""
    count = len(plan.strays)
    return f"{count} rank{' takes' if count == 1 else 's take'} the role of the data-parallel group"


def why_budgets(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reason for a decision that changes only budgets."""
    observed, then = plan.observed, assigned.then
    assert observed.engine is not None
    standings = {each.id: each for each in observed.standings}
    alone = split(observed.engine, observed.work, then.prefill, then.mixed, budgets=False)
    shown = plan.shown(alone, lending=False).prompt_pressure
    presses = figure(shown)
    on, whose = workers(then.prefill, "prefill"), workers(len(plan.budgets), "decode")
    take, leave = ("takes", "leaves") if len(plan.budgets) == 1 else ("take", "leave")
    if plan.budgets[0].budget_tokens > standings[plan.budgets[0].worker_id].budget_tokens:
        tokens, waits = plan.budgets[0].budget_tokens, _waits(plan, alone)
        if shown < RAISE:
            return f"a queue of prompts begins on {on}{waits}; {whose} {take} up to {tokens} prompt tokens a step"
        lent = figure(plan.shown(then, lending=True).prompt_pressure)
        # Without a prefill worker the pressure is infinite, so its figure would mean nothing.
        begins = f"prefill pressure {presses} on {on}" if then.prefill else "no worker is for prompts alone"
        lent = lent if then.prefill else f"a pressure of {lent}"
        return f"{begins}{waits}; {whose} that {take} up to {tokens} prompt tokens a step {leave} {lent}"
    if assigned.memory.apart.on:
        return f"more work is done with prompts on {on} only, at a pressure of {presses}; {whose} {take} none"
    return (
        f"prefill pressure on {on} was below {LOWER:g} for {CALM_NS / 1e9:g} s; without prompts on {whose} it is"
        f" {presses}"
    )


def why_kept(plans: Sequence[ModelPlan]) -> str:
    """Return the reason for a decision that changes nothing."""
    return "; ".join(map(_stands, plans)) if plans else "no workers are registered"


def why_advised(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reasons for all changes that a plan recommends for its model."""
    said = [why_moved(plan, assigned)] if plan.moves else []
    said += [why_called(plan, assigned)] if plan.called else []
    said += [why_together(plan, assigned)] if plan.strays else []
    return "; ".join([*said, why_budgets(plan, assigned)] if plan.budgets else said)


_WHY_KEPT: Final = {
    RoleReason.TOO_SMALL: ", which is more than any split of roles has room for",
    RoleReason.BEST: "; no other split of roles lowers it by enough",
    RoleReason.UNMET: ", in numbers that limits do not allow; no others can be reached",
    RoleReason.UNMET_YET: ", in numbers that limits do not allow; missing workers have "
    f"{STARTING_NS // 1_000_000_000} s to start before roles change",
    RoleReason.HELD: "; another split would lower it, but limits, quiet hours, pins or recent moves prevent it",
}


def _queued(work: Workload) -> str:
    # The planner compares splits by the work that waits now. People are shown whether targets are met.
    within = "a second" if work.due_ns == LEAST_DUE_NS else f"{work.due_ns / 1e9:.1f} s"
    return f"; no split of roles computes all that waits within {within}"


def _stands(plan: ModelPlan) -> str:
    model, assigned = plan.observed.model, plan.assigned
    if assigned is None:
        return f"{model} keeps its roles: {plan.observed.unknown}"
    now, why = plan.shown_now(assigned), _WHY_KEPT.get(assigned.code, "")
    if assigned.code is RoleReason.TOO_SMALL and not _is_too_small(plan, assigned, now):
        why = _queued(plan.observed.work)
    return (
        f"{model} keeps its roles: pressure {figure(now.prompt_pressure)} on {workers(now.prefill, 'prefill')}, "
        f"{figure(now.decode_pressure)} on {workers(now.mixed, 'decode')}{why}"
    )


def _is_too_small(plan: ModelPlan, assigned: RolePlan, now: Split) -> bool:
    """Return whether all splits of roles are overloaded, by the pressures shown on status pages."""
    lending = not assigned.memory.apart.on
    return all(each.pressure > 1 for each in (now, *(plan.shown(one, lending=lending) for one in assigned.candidates)))


def _waits(plan: ModelPlan, now: Split) -> str:
    """Return a clause about the time for which a prompt would wait, or an empty string if it is short."""
    engine = plan.observed.engine
    if engine is None:
        return ""
    ttft_ms = outlook(engine, plan.observed.work, now).ttft_ns / 1e6
    return f", TTFT would reach {ttft_ms / 1e3:.1f} s" if ttft_ms >= LONG_MS else ""


MAX_UINT32: Final = 2**32 - 1
# Sums over many workers are limited to the maximum of a message's field.
MAX_UINT64: Final = 2**64 - 1
NS_PER_MS: Final = 1_000_000
CODE_NOBODY: Final = "no_workers"
# The code for a model about which too little is known.
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
    """Return the changes of a plan in mode auto.

    There is one decision for each kind of change, roles before budgets.
    """
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


def recommended(snapshot: ClusterSnapshot, plan: ModelPlan) -> Decision | None:
    """Return a decision that recommends a change to the operator, or None if there is none to recommend.

    If a metrics service assesses the model, its advice is recommended. Otherwise the decision describes the changes
    that mode auto would make.
    """
    if plan.assigned is None:
        return None
    if plan.assessment is not None:
        return _advised(snapshot, plan, plan.assessment)
    if not (plan.moves or plan.budgets or plan.called or plan.strays):
        return None
    reason = f"In mode auto it would act: {why_advised(plan, plan.assigned)}"
    decision = _about(ACTION_RECOMMEND, snapshot, plan, plan.assigned, reason)
    decision.changes.extend(
        WorkerChange(worker_id=each.worker_id, assignment=_assignment(plan.observed.model, each))
        for each in (*plan.moves, *plan.called, *plan.strays, *plan.budgets)
    )
    return decision


def _advised(snapshot: ClusterSnapshot, plan: ModelPlan, assessment: Assessment) -> Decision | None:
    action = assessment.action
    if action is None:
        return None
    # The verdict's sentence already describes the effect of the change. Ratings by the planner would be a second
    # opinion.
    decision = Decision(
        action=ACTION_RECOMMEND,
        reason=assessment.sentence,
        reason_code=assessment.code,
        model=plan.observed.model,
        inputs=summary(snapshot),
        targets=[_target(plan)],
    )
    role, budget_tokens = role_from_name(action.role, action.budget_tokens)
    wanted = Assignment(model=plan.observed.model, role=role, budget_tokens=budget_tokens)
    decision.changes.extend(WorkerChange(worker_id=each, assignment=wanted) for each in action.workers)
    return decision


def worker_changes(orders: Iterable[Order]) -> list[WorkerChange]:
    """Return the orders in the form for messages, in their order."""
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
    """Return a decision that reports a worker's new role, whoever set it."""
    change, role = worker.role_change, role_name(worker.assignment)
    actor = change.actor or "somebody"
    return Decision(
        action=ACTION_ROLE_MOVED,
        reason=f"{actor} moved {worker.id} to {role}: {change.reason or NO_REASON}",
        actor=actor,
        worker_id=worker.id,
        worker_incarnation=worker.incarnation,
        assignment=worker.assignment,
    )


def seen(plan: ModelPlan) -> Seen | None:
    """Return the present state of a model for a later comparison, or None if too little is known."""
    if plan.assigned is None:
        return None
    now, work = plan.shown_now(plan.assigned), plan.observed.work
    return Seen(
        prefill=now.prefill,
        decode=now.mixed,
        prompt_pressure=min(now.prompt_pressure, MAX_PRESSURE),
        decode_pressure=min(now.decode_pressure, MAX_PRESSURE),
        waiting_ms=work.waiting_ns / NS_PER_MS,
        decodes=min(work.decodes, MAX_UINT32),
    )


def counterfactual(without: Replay, then: Replay) -> Counterfactual:
    """Return how the demand since a decision would have been served without and with the decision."""
    over_ms = without.lasted_ns // NS_PER_MS
    return Counterfactual(method=METHOD, over_ms=over_ms, without=_replayed(without), **{"with": _replayed(then)})


def _replayed(replay: Replay) -> Replayed:
    mean = replay.mean()
    return Replayed(
        prefill=mean.prefill, decode=mean.mixed, ttft_ms=mean.ttft_ns / NS_PER_MS, tpot_ms=mean.tpot_ns / NS_PER_MS,
        served=mean.served,
    )  # fmt: skip


def summary(snapshot: ClusterSnapshot) -> ClusterSummary:
    """Return the pools on which a decision was based."""
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
    """Return an action as users see it, such as keep or set_role. Actions of later releases are unknown."""
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
    """Return candidates by name, with the higher pressure of their two phases."""
    return [
        Alternative(
            name=f"{each.prefill} prefill, {each.decode} decode" if each.prefill else f"{each.decode} that do both",
            score=max(each.prompt_pressure, each.decode_pressure),
        )
        for each in candidates
    ]


def _candidates(plan: ModelPlan) -> list[Candidate]:
    """Return the chosen split, then the present one, then others by ascending cost."""
    engine, work, assigned = plan.observed.engine, plan.observed.work, plan.assigned
    if engine is None or assigned is None:
        return []
    chosen = dict.fromkeys((assigned.then, assigned.now, *assigned.candidates[:MAX_CANDIDATES]))
    return [_candidate(engine, work, plan, assigned, each) for each in list(chosen)[:MAX_CANDIDATES]]


def _candidate(engine: WorkerProfile, work: Workload, plan: ModelPlan, assigned: RolePlan, split: Split) -> Candidate:
    predicted = outlook(engine, work, split)
    shown = plan.shown(split, lending=not assigned.memory.apart.on)
    return Candidate(
        prefill=split.prefill,
        decode=split.mixed,
        prompt_pressure=min(shown.prompt_pressure, MAX_PRESSURE),
        decode_pressure=min(shown.decode_pressure, MAX_PRESSURE),
        ttft_ms=predicted.ttft_ns / NS_PER_MS,
        tpot_ms=predicted.tpot_ns / NS_PER_MS,
        served=predicted.served,
    )


def _assignment(model: str, change: RoleOrder) -> Assignment:
    return Assignment(model=model, role=f"ROLE_{change.role.name}", budget_tokens=change.budget_tokens)
