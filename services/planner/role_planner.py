"""Decisions about the roles of each model's workers, and the resulting orders. Pure; callers pass the time.

`services/planner/executor.py` sends the orders to workers.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Worker
from libs.policy.planner.limits import PlannerLimits
from libs.policy.planner.role_planning import (
    Memory,
    MoveEvidence,
    PlannedWorker,
    RoleOrder,
    RolePlan,
    RoleReason,
    assign,
)
from libs.policy.planner.scaling import RoleWish, call_up, workers_needed
from libs.policy.pressure import Split
from libs.policy.roles import Role
from libs.policy.verdict.assessment import Assessment
from services.planner.fleet_view import FleetView
from services.planner.observer import ObservedModel

# The bound on calls in progress. Orders beyond it are dropped, and the next decision makes them again.
MAX_CALLS: Final = 64


@dataclass(frozen=True, slots=True)
class Order:
    """A change of assignment that is requested from one worker."""

    worker: Worker
    wanted: Assignment
    """The assignment to set. Its epoch is one more than that on which the decision was based."""
    reason: str
    own_budget_tokens: int = 0
    """The worker's budget from its start or from a person. The worker publishes it, so that later planners know it."""
    before: Assignment | None = None
    """The assignment that was requested last, if the worker's registration does not show it yet."""


NO_WISHES: Final[Mapping[str, RoleWish]] = MappingProxyType({})
# A bound on the epoch, in case the registry contains nonsense. A worker refuses such a call as stale.
MAX_UINT64: Final = 2**64 - 1
SECOND_NS: Final = 1_000_000_000
# The time for which a worker that could not be reached is not chosen, so that others relieve the load.
FAILED_NS: Final = 5_000_000_000


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """An observed model and the decisions about it. There are none if too little is known."""

    observed: ObservedModel
    assigned: RolePlan | None
    moves: Sequence[RoleOrder] = ()
    """The moves of workers to which no call is in progress."""
    budgets: Sequence[RoleOrder] = ()
    called: Sequence[RoleOrder] = ()
    """The orders by which spare workers take a role or return to standby."""
    strays: Sequence[RoleOrder] = ()
    """The orders by which ranks take the role of their group."""
    assessment: Assessment | None = None
    """The published assessment of the model; None if no metrics service publishes one."""

    # Roles are decided by how soon a queue would be empty. People are shown whether targets are met, as on all status
    # pages.
    def shown_now(self, assigned: RolePlan) -> Split:
        """Return the present split with its published pressures, or with the planner's own if none are published."""
        # Orders that no worker has carried out are left out, because no other view knows them.
        return assigned.now if self.assessment is None else self.assessment.standing

    def shown(self, split: Split, *, lending: bool) -> Split:
        """Return a split with the pressures shown on status pages.

        With `lending`, decode workers compute prompts too.
        """
        found = self.assessment
        if found is None:
            return split
        standing = found.standing
        if (split.prefill, split.mixed) == (standing.prefill, standing.mixed):
            return standing
        return found.pressed(split.prefill, split.mixed, lending=lending)


@dataclass(slots=True)
class _RequestedAssignment:
    """An assignment that was requested from a worker, kept until telemetry or the registry shows it."""

    incarnation: int
    assignment: Assignment
    requested_ns: int
    outstanding: bool = True


class RolePlanner:
    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}
        self._wanted: dict[str, _RequestedAssignment] = {}
        self._failed_ns: dict[str, int] = {}
        """The time at which a call to a worker failed; 0 until the next decision sets it."""
        self._own_budgets: dict[str, int] = {}
        """The budget of each worker from its start or from a person, before this planner changed it.

        Bounded by the number of workers.
        """
        self._moved_ns: deque[int] = deque()
        """The times of role changes within the last second, over all models.

        Bounded by the limit on moves per second.
        """
        self._evidence = MoveEvidence()
        """The durations of role changes, from the decision to the worker's answer."""

    def requested_assignments(self, view: FleetView) -> dict[str, Assignment]:
        """Return the requested assignment of each worker whose telemetry and registration show nothing later."""
        if not self._wanted:
            return {}
        indices = view.roster.index_of
        found, wanted = {}, {}
        for name, wanted_role in self._wanted.items():
            index = indices.get(name)
            if index is None or wanted_role.incarnation != view.roster.incarnation[index]:
                continue
            newer = wanted_role.assignment.epoch > view.epoch(index)
            if newer or wanted_role.outstanding:
                wanted[name] = wanted_role
            if newer:
                found[name] = wanted_role.assignment
        self._wanted = wanted
        return found

    def decide(
        self,
        models: Iterable[ObservedModel],
        limits: PlannerLimits,
        now_ns: int,
        *,
        acts: bool,
        wishes: Mapping[str, RoleWish] = NO_WISHES,
    ) -> list[ModelPlan]:
        """Decide about each model.

        `acts` says whether the changes are carried out; changed workers are then not moved again for some time.
        `wishes` contains the number of workers of each model that should have a role.
        """
        plans, memories, room = [], {}, MAX_CALLS
        left = self._left_alone(now_ns)
        for each in models:
            evidence = self._evidence.aged(each.age_ns)
            before = memories[each.model] = self._memories.get(each.model, Memory())
            if each.engine is None:
                plans.append(ModelPlan(each, None))
                continue
            most = min(self._moves_left(limits, now_ns), room)
            assigned = assign(
                each.engine,
                each.work,
                self._standings(each.standings, left),
                before,
                now_ns,
                limits=limits.of(each.model),
                most_moves=most,
                evidence=evidence,
            )
            # Bounded by the number of calls in progress. The next decision includes the other workers.
            moves = self._free(assigned.moves)[:room]
            called = self._called(each, assigned, wishes.get(each.model), limits, most=most - len(moves))
            strays = [order for order in self._free(each.strays) if order.worker_id not in left]
            budgets = self._free(assigned.budgets)[: room - len(moves) - len(called)]
            plan = ModelPlan(each, assigned, moves, budgets, called, strays)
            room -= len(moves) + len(called) + len(budgets)
            plans.append(plan)
            memories[each.model] = (
                assigned.memory if acts else replace(assigned.memory, paid_ns=before.paid_ns, turn=before.turn)
            )
            if acts:
                self._moved_ns.extend([now_ns] * (len(plan.moves) + len(plan.called)))
        self._memories = memories
        if len(self._own_budgets) > sum(len(plan.observed.standings) for plan in plans):
            there = {each.id for plan in plans for each in plan.observed.standings}
            self._own_budgets = {name: tokens for name, tokens in self._own_budgets.items() if name in there}
        return plans

    def _called(
        self, model: ObservedModel, assigned: RolePlan, wish: RoleWish | None, limits: PlannerLimits, *, most: int
    ) -> list[RoleOrder]:
        # Spare workers are used at once if no split has enough capacity. The scaler wishes for more workers later.
        if wish is None or model.engine is None or not wish.spares:
            return []
        changing = {change.worker_id for change in assigned.changes}
        standings = [each for each in model.standings if each.id not in changing]
        held = limits.of(model.model)
        if assigned.code is RoleReason.TOO_SMALL:
            serving = sum(each.role is not Role.STANDBY for each in model.standings)
            wish = replace(wish, serving=max(wish.serving, workers_needed(model.engine, model.work, serving, held)))
        wish = replace(wish, serving=wish.serving - (len(model.standings) - len(standings)))
        return self._free(call_up(model.engine, model.work, standings, wish, held, most=max(most, 0)))

    def order(self, change: RoleOrder, view: FleetView, reason: str, now_ns: int) -> Order:
        """Create the order for a change. The worker is treated as changed until `done` reports otherwise."""
        index = view.roster.index_of[change.worker_id]
        worker, wanted_role = view.roster.workers[index], self._wanted.get(change.worker_id)
        known = max(view.epoch(index), wanted_role.assignment.epoch if wanted_role else 0)
        assignment = Assignment(
            model=worker.assignment.model,
            role=f"ROLE_{change.role.name}",
            budget_tokens=change.budget_tokens,
            epoch=min(known + 1, MAX_UINT64),
        )
        self._wanted[change.worker_id] = _RequestedAssignment(worker.incarnation, assignment, now_ns)
        before = (
            wanted_role.assignment if wanted_role and wanted_role.assignment.epoch > worker.assignment.epoch else None
        )
        return Order(worker, assignment, reason, self._own_budgets.get(change.worker_id, 0), before)

    def done(self, order: Order, assignment: Assignment | None, now_ns: int, *, failed: bool = False) -> None:
        """Record the end of a call. If nothing has changed, the next decision may choose the worker again.

        `failed` means that the worker could not be reached. It is then not chosen for `FAILED_NS`.
        """
        if failed:
            self._failed_ns[order.worker.id] = 0
        wanted = self._wanted.get(order.worker.id)
        if wanted is None or wanted.assignment is not order.wanted:
            return
        if assignment is not None:
            self._evidence = self._evidence.measured(now_ns - wanted.requested_ns)
            self._wanted[order.worker.id] = replace(wanted, assignment=assignment, outstanding=False)
            return
        del self._wanted[order.worker.id]
        for model, memory in self._memories.items():
            paid_ns = _without(memory.paid_ns, order.worker.id)
            self._memories[model] = replace(memory, paid_ns=paid_ns, turn=memory.turn.failed())

    def _standings(self, standings: Sequence[PlannedWorker], left: set[str]) -> Sequence[PlannedWorker]:
        """Add each worker's own budget. Pin workers that could not be reached."""
        own = self._own_budgets
        for each in standings:
            if each.own_budget_tokens:  # an earlier planner changed this worker
                own.setdefault(each.id, each.own_budget_tokens)
        chosen = {each.id: each.budget_tokens for each in standings if each.budget_tokens and each.keeps_budget}
        if not (left or own or chosen):
            return standings
        found = []
        for each in standings:
            if each.keeps_budget:
                own.pop(each.id, None)
                if chosen.get(each.id):
                    own[each.id] = chosen[each.id]
            if each.id in left or each.id in own:
                pinned = each.pinned or each.id in left
                found.append(each._replace(pinned=pinned, own_budget_tokens=own.get(each.id, 0)))
            else:
                found.append(each)
        return found

    def _left_alone(self, now_ns: int) -> set[str]:
        self._failed_ns = {
            name: at_ns or now_ns for name, at_ns in self._failed_ns.items() if not at_ns or now_ns - at_ns < FAILED_NS
        }
        return set(self._failed_ns)

    def _moves_left(self, limits: PlannerLimits, now_ns: int) -> int:
        while self._moved_ns and now_ns - self._moved_ns[0] >= SECOND_NS:
            self._moved_ns.popleft()
        return 0 if limits.quiet(now_ns) else max(limits.moves_per_s - len(self._moved_ns), 0)

    def _free(self, changes: Iterable[RoleOrder]) -> list[RoleOrder]:
        return [change for change in changes if not self._is_outstanding(change.worker_id)]

    def _is_outstanding(self, worker_id: str) -> bool:
        wanted = self._wanted.get(worker_id)
        return wanted is not None and wanted.outstanding


def _without(paid_ns: Mapping[str, int], worker_id: str) -> Mapping[str, int]:
    return MappingProxyType({name: at_ns for name, at_ns in paid_ns.items() if name != worker_id})
