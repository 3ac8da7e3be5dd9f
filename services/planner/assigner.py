"""Which workers are to be changed now, in words too; remembers what decisions need of earlier ones. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.policy.planner.assigning import CALM_NS, LOWER, Assigned, Change, Code, Memory, Standing, assign
from libs.policy.planner.capacity import Split, split
from libs.policy.planner.moves import MAX_ALTERNATIVES, Alternative
from libs.policy.roles import Role
from services.planner.actions import Order
from services.planner.observe import ObservedWorker
from services.planner.observe_models import ObservedModel

MAX_PRESSURE: Final = 1_000.0
"""As it is told: without workers for a phase it has no bound."""
MAX_UINT64: Final = 2**64 - 1
"""Of an epoch that a registry's nonsense may bring; a call made for it is refused as stale."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is to change about a model's workers, and why."""

    model: str
    changes: Sequence[tuple[Change, str]]
    """Each with its reason."""
    alternatives: Sequence[Alternative]
    """The chosen split first, then others by the pressure that they would leave."""

    @property
    def reasons(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(reason for _, reason in self.changes))


@dataclass(slots=True)
class _Wanted:
    """What a worker was asked for, until its telemetry or the registry shows it."""

    incarnation: int
    assignment: Assignment
    outstanding: bool = True


class Assigner:
    """Decides about each model by itself."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}
        self._wanted: dict[str, _Wanted] = {}

    def as_asked(self, observed: Iterable[ObservedWorker]) -> list[ObservedWorker]:
        """Workers with the assignments that they were asked to take, as far as nothing newer is known of them."""
        found, wanted = [], {}
        for each in observed:
            asked = self._wanted.get(each.worker.id)
            if asked is not None and asked.incarnation == each.worker.incarnation:
                newer = asked.assignment.epoch > each.assignment.epoch
                if newer or asked.outstanding:
                    wanted[each.worker.id] = asked
                found.append(replace(each, assignment=asked.assignment) if newer else each)
            else:
                found.append(each)
        self._wanted = wanted
        return found

    def decide(self, models: Iterable[ObservedModel], now_ns: int, *, acts: bool) -> list[ModelPlan]:
        """For each model that is to change. `acts`: whether the changes are made, so that workers rest after them."""
        plans, memories = [], {}
        for each in models:
            before = memories[each.model] = self._memories.get(each.model, Memory())
            if each.engine is None:
                continue
            assigned = assign(each.engine, each.work, each.standings, before, now_ns)
            memories[each.model] = assigned.memory if acts else replace(assigned.memory, moved_ns=before.moved_ns)
            changes = [change for change in assigned.changes if not self._is_outstanding(change.worker_id)]
            if changes:
                plans.append(_plan(each, assigned, changes))
        self._memories = memories
        return plans

    def order(self, change: Change, observed: ObservedWorker, reason: str) -> Order:
        """What to ask a worker for; from now on it is taken for one that has it, until `done` says that it has not."""
        assignment = Assignment(
            model=observed.assignment.model,
            role=f"ROLE_{change.role.name}",
            budget_tokens=change.budget_tokens,
            epoch=min(observed.assignment.epoch + 1, MAX_UINT64),
        )
        self._wanted[change.worker_id] = _Wanted(observed.worker.incarnation, assignment)
        return Order(observed.worker, assignment, reason)

    def done(self, order: Order, assignment: Assignment | None) -> None:
        """A call has ended; one that changed nothing leaves its worker to the next decision, as if it had not been."""
        wanted = self._wanted.get(order.worker.id)
        if wanted is None or wanted.assignment is not order.wanted:
            return
        if assignment is not None:
            self._wanted[order.worker.id] = _Wanted(wanted.incarnation, assignment, outstanding=False)
            return
        del self._wanted[order.worker.id]
        for model, memory in self._memories.items():
            moved_ns = {name: at_ns for name, at_ns in memory.moved_ns.items() if name != order.worker.id}
            self._memories[model] = replace(memory, moved_ns=MappingProxyType(moved_ns))

    def _is_outstanding(self, worker_id: str) -> bool:
        wanted = self._wanted.get(worker_id)
        return wanted is not None and wanted.outstanding


def _plan(observed: ObservedModel, assigned: Assigned, changes: Sequence[Change]) -> ModelPlan:
    standings = {each.id: each for each in observed.standings}
    moves = [change for change in changes if change.role is not standings[change.worker_id].role]
    budgets = [change for change in changes if change.role is standings[change.worker_id].role]
    found = [(change, _why_moved(assigned, moves)) for change in moves]
    found += [(change, _why_budget(observed, assigned.then, budgets, standings)) for change in budgets]
    others = [each for each in assigned.candidates if each != assigned.then]
    alternatives = [_alternative(each) for each in (assigned.then, *others[:MAX_ALTERNATIVES])]
    return ModelPlan(observed.model, found, alternatives)


def _alternative(each: Split) -> Alternative:
    return Alternative(f"{each.prefill} prefill, {each.mixed} decode", min(each.pressure, MAX_PRESSURE))


def _why_moved(assigned: Assigned, moves: Sequence[Change]) -> str:
    now = assigned.now
    to_prefill = sum(change.role is Role.PREFILL for change in moves)
    way = f"{to_prefill} decode to prefill" if to_prefill else f"{len(moves)} prefill to decode"
    then = f"{way} leaves {_figure(assigned.then.pressure)}"
    if assigned.code is Code.DECODES_PRESS:
        return f"decodes press {_figure(now.decode_pressure)} on {_workers(now.mixed, 'decode')}; {then}"
    return f"prompts press {_figure(now.prompt_pressure)} on {_workers(now.prefill, 'prefill')}; {then}"


def _why_budget(observed: ObservedModel, then: Split, budgets: Sequence[Change], standings: dict[str, Standing]) -> str:
    assert observed.engine is not None
    alone = split(observed.engine, observed.work, then.prefill, then.mixed, budgets=False)
    on, whose = _workers(then.prefill, "prefill"), _workers(len(budgets), "decode")
    with_budgets = split(observed.engine, observed.work, then.prefill, then.mixed)
    take, leave = ("takes", "leaves") if len(budgets) == 1 else ("take", "leave")
    if budgets[0].budget_tokens > standings[budgets[0].worker_id].budget_tokens:
        return (
            f"prompts press {_figure(alone.prompt_pressure)} on {on}; {whose} that {take} up to"
            f" {budgets[0].budget_tokens} prompt tokens a step {leave} {_figure(with_budgets.prompt_pressure)}"
        )
    return (
        f"prompts have pressed less than {LOWER:g} on {on} for {CALM_NS / 1e9:g} s; without any on {whose} they press"
        f" {_figure(alone.prompt_pressure)}"
    )


def _workers(count: int, role: str) -> str:
    return f"{count} {role} worker{'' if count == 1 else 's'}"


def _figure(pressure: float) -> str:
    return f"{pressure:.1f}" if pressure <= MAX_PRESSURE else f"more than {MAX_PRESSURE:.0f}"
