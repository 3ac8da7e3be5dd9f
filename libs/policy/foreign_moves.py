"""Role moves in a fleet that Fulcrum only observes, decided by the planner's rule and made one at a time.

Budgets of such a fleet cannot be changed. A move takes effect only once the fleet's router follows it and the worker's
earlier work has ended. Until moves have been measured, each is assumed to take the longest time within which a move may
pay off.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.role_planning import (
    DECODES_PRESS,
    MOST_NS,
    Memory,
    MoveEvidence,
    PlannedWorker,
    RolePlan,
    RoleReason,
    assign,
)
from libs.policy.pressure import figure
from libs.policy.roles import Role
from libs.policy.verdict.causes import workers
from libs.policy.verdict.state import ModelState, WorkerState

UNMEASURED_FOREIGN: Final = MoveEvidence(effect_ns=float(MOST_NS))
AGE_NS: Final = 1_000_000_000
"""The assumed age of scraped figures. Scrapes are half a second or a second apart."""


@dataclass(frozen=True, slots=True)
class ForeignMove:
    """A change of one worker's role, with the plan that calls for it."""

    model: str
    worker: str
    before: str
    role: str
    plan: RolePlan

    @property
    def why(self) -> str:
        """The reason in words, with the pressure predicted after the move."""
        now, then = self.plan.now, self.plan.then
        leaves = f"moving a {self.before} server to {self.role} leaves a pressure of {figure(then.pressure)}"
        if self.plan.code is RoleReason.LIMITS:
            return f"limits ask for other numbers than {now.prefill} prefill and {now.mixed} decode; {leaves}"
        if self.plan.code is RoleReason.DECODES_PRESS:
            word = "decode" if now.decode_pressure >= DECODES_PRESS else "rising decode"
            return f"{word} pressure {figure(now.decode_pressure)} on {workers(now.mixed, 'decode')}; {leaves}"
        return f"prefill pressure {figure(now.prompt_pressure)} on {workers(now.prefill, 'prefill')}; {leaves}"


def plan_move(
    state: ModelState,
    fixed: Collection[str],
    memory: Memory,
    now_ns: int,
    *,
    limits: ModelLimits,
    may_move: bool,
    evidence: MoveEvidence = UNMEASURED_FOREIGN,
) -> tuple[RolePlan, ForeignMove | None]:
    """Decide about one model, and return its move if one is due.

    `fixed` names workers whose role cannot change. No worker moves until an earlier move has paid off.
    """
    planned = [_planned(each, fixed) for each in state.workers]
    rests = any(now_ns < paid_ns for paid_ns in memory.paid_ns.values())
    plan = assign(
        state.engine,
        state.work,
        planned,
        memory,
        now_ns,
        limits=limits,
        most_moves=1 if may_move and not rests else 0,
        evidence=evidence.aged(AGE_NS),
        lending=sum(each.lends for each in state.workers),
    )
    if not plan.moves:
        return plan, None
    (order,) = plan.moves
    before, role = ("decode", "prefill") if order.role is Role.PREFILL else ("prefill", "decode")
    return plan, ForeignMove(state.model, order.worker_id, before, role, plan)


def withheld(move: ForeignMove, roles: Mapping[str, str], limits: ModelLimits) -> str:
    """Return the reason why a move must not be made; empty if it may be made.

    `roles` has the model's ready workers by name, as the control plane lists them. Telemetry may lag behind it.
    """
    if roles.get(move.worker) != move.before:
        return f"{move.worker} is no longer {move.before}, or not ready"
    prefill = sum(each == "prefill" for each in roles.values())
    step = 1 if move.role == "prefill" else -1
    after = prefill + step, len(roles) - prefill - step
    now_allowed = limits.allow(prefill, len(roles) - prefill)
    if not limits.allow(*after) and (now_allowed or min(after) < 1):
        return (
            f"it would leave {after[0]} prefill and {after[1]} decode, fewer than the minimum of"
            f" {limits.prefill_min} and {limits.decode_min}"
        )
    return ""


def without_move(memory: Memory, before: Memory) -> Memory:
    """Return the memory after a decision whose move was not made."""
    return replace(memory, paid_ns=before.paid_ns, turn=before.turn)


def why_kept(model: str, plan: RolePlan) -> str:
    """Explain why a model's roles stay, with its pressures."""
    now = plan.now
    found = (
        f"{model} keeps its roles: pressure {figure(now.prompt_pressure)} on {workers(now.prefill, 'prefill')},"
        f" {figure(now.decode_pressure)} on {workers(now.mixed, 'decode')}"
    )
    return found + {
        RoleReason.HELD: "; another split would lower it, but a move must first pay off, or workers are fixed",
        RoleReason.BEST: "; no other split of roles lowers it by enough",
        RoleReason.TOO_SMALL: ", which is more than any split of roles has room for",
        RoleReason.UNMET: ", in numbers that limits do not allow",
        RoleReason.UNMET_YET: ", in numbers that limits do not allow yet",
    }.get(plan.code, "")


def _planned(worker: WorkerState, fixed: Collection[str]) -> PlannedWorker:
    pinned = worker.lends or worker.id in fixed
    return PlannedWorker(
        worker.id, worker.role, worker.budget_tokens, True, worker.prompt_tokens, worker.kv_tokens, pinned
    )
