"""Reasons of decisions as one plain sentence each. Pure."""

from collections.abc import Sequence
from typing import Final

from libs.policy.planner.outlook import outlook
from libs.policy.planner.role_planning import CALM_NS, LOWER, RolePlan, RoleReason
from libs.policy.pressure.splits import Split, split
from libs.policy.roles import Role
from services.planner.role_planner import ModelPlan

# Larger pressures are shown as this one: without workers for a phase, pressure has no bound.
MAX_PRESSURE: Final = 1_000.0
# A predicted TTFT is mentioned from this length on.
LONG_MS: Final = 1_000


def why_moved(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reason for a change of roles."""
    now, then = assigned.now, assigned.then
    to_prefill = sum(change.role is Role.PREFILL for change in plan.moves)
    way = f"{to_prefill} decode to prefill" if to_prefill else f"{len(plan.moves)} prefill to decode"
    leaves = f"{way} leaves {figure(then.pressure)}"
    if assigned.code is RoleReason.LIMITS:
        return f"limits ask for other numbers than {workers(now.prefill, 'prefill')} and {now.mixed} decode; {leaves}"
    if assigned.code is RoleReason.DECODES_PRESS:
        return f"decodes press {figure(now.decode_pressure)} on {workers(now.mixed, 'decode')}; {leaves}"
    pressed = f"prompts press {figure(now.prompt_pressure)} on {workers(now.prefill, 'prefill')}"
    return f"{pressed}{_waits(plan, now)}; {leaves}"


def why_called(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reason why spare workers take a role, or leave theirs."""
    up = [each for each in plan.called if each.role is not Role.STANDBY]
    if up:
        prefill = sum(each.role is Role.PREFILL for each in up)
        take = "takes a role" if len(up) == 1 else "take roles"
        return (
            f"work presses {figure(assigned.now.pressure)} on {assigned.now.prefill + assigned.now.mixed} workers;"
            f" {workers(len(up), 'spare')} {take}, {prefill} prefill and {len(up) - prefill} decode"
        )
    stand = "stands" if len(plan.called) == 1 else "stand"
    return f"fewer workers are wished: {workers(len(plan.called), 'spare')} {stand} by"


def why_together(plan: ModelPlan, _assigned: RolePlan) -> str:
    """Return the reason for moving ranks whose role differs from that of their group."""
    count = len(plan.strays)
    return f"{count} rank{' takes' if count == 1 else 's take'} the role of the data-parallel group"


def why_budgets(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reason for changes of budgets alone."""
    observed, then = plan.observed, assigned.then
    assert observed.engine is not None
    standings = {each.id: each for each in observed.standings}
    alone = split(observed.engine, observed.work, then.prefill, then.mixed, budgets=False)
    on, whose = workers(then.prefill, "prefill"), workers(len(plan.budgets), "decode")
    take, leave = ("takes", "leaves") if len(plan.budgets) == 1 else ("take", "leave")
    if plan.budgets[0].budget_tokens > standings[plan.budgets[0].worker_id].budget_tokens:
        return (
            f"prompts press {figure(alone.prompt_pressure)} on {on}{_waits(plan, alone)}; {whose} that {take} up to"
            f" {plan.budgets[0].budget_tokens} prompt tokens a step {leave} {figure(then.prompt_pressure)}"
        )
    return (
        f"prompts have pressed less than {LOWER:g} on {on} for {CALM_NS / 1e9:g} s; without any on {whose} they press"
        f" {figure(alone.prompt_pressure)}"
    )


def why_kept(plans: Sequence[ModelPlan]) -> str:
    """Return the reason for a decision that changes nothing."""
    return "keep: " + ("; ".join(map(_stands, plans)) if plans else "no workers are registered")


def why_advised(plan: ModelPlan, assigned: RolePlan) -> str:
    """Return the reasons for all changes that a plan recommends for its model."""
    said = [why_moved(plan, assigned)] if plan.moves else []
    said += [why_called(plan, assigned)] if plan.called else []
    said += [why_together(plan, assigned)] if plan.strays else []
    return "; ".join([*said, why_budgets(plan, assigned)] if plan.budgets else said)


def figure(pressure: float) -> str:
    """Format a pressure for people to read, cut at `MAX_PRESSURE`."""
    return f"{pressure:.1f}" if pressure <= MAX_PRESSURE else f"more than {MAX_PRESSURE:.0f}"


def workers(count: int, role: str) -> str:
    """Return a count with its noun, such as "1 decode worker" or "2 decode workers"."""
    return f"{count} {role} worker{'' if count == 1 else 's'}"


_WHY_KEPT: Final = {
    RoleReason.TOO_SMALL: ", which is more than there is in any split of roles",
    RoleReason.BEST: "; no other split of roles relieves it by enough",
    RoleReason.UNMET: ", in numbers that limits do not allow; no others can be reached",
    RoleReason.HELD: "; another split would relieve it, but workers rest, are pinned, or roles stand still",
}


def _stands(plan: ModelPlan) -> str:
    model, assigned = plan.observed.model, plan.assigned
    if assigned is None:
        return f"roles of {model} stay: {plan.observed.unknown}"
    now = assigned.now
    return (
        f"{model}: prompts press {figure(now.prompt_pressure)} on {workers(now.prefill, 'prefill')}, decodes "
        f"{figure(now.decode_pressure)} on {workers(now.mixed, 'decode')}{_WHY_KEPT.get(assigned.code, '')}"
    )


def _waits(plan: ModelPlan, now: Split) -> str:
    """Return how long a prompt would wait, or nothing if that is short."""
    engine = plan.observed.engine
    if engine is None:
        return ""
    ttft_ms = outlook(engine, plan.observed.work, now).ttft_ns / 1e6
    return f", TTFT would reach {ttft_ms / 1e3:.1f} s" if ttft_ms >= LONG_MS else ""
