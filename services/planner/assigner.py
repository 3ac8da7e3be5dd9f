"""What is to change about each model's workers now; remembers what decisions need of earlier ones. No I/O."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.policy.planner.assigning import Assigned, Change, Memory, assign
from libs.policy.planner.limits import Limits
from services.planner.actions import Order
from services.planner.observe import ObservedWorker
from services.planner.observe_models import ObservedModel

MAX_UINT64: Final = 2**64 - 1
"""Of an epoch that a registry's nonsense may bring; a call made for it is refused as stale."""
SECOND_NS: Final = 1_000_000_000
FAILED_NS: Final = 5_000_000_000
"""A worker that could not be asked is left as it is for so long: others may relieve the load."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model as it was observed, and what was decided about it; nothing where too little is known."""

    observed: ObservedModel
    assigned: Assigned | None
    moves: Sequence[Change] = ()
    """Those of the decision that no call is outstanding for."""
    budgets: Sequence[Change] = ()


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
        self._failed_ns: dict[str, int] = {}
        """When workers could not be asked; 0 until the next decision."""
        self._moved_ns: deque[int] = deque()
        """When roles were changed within the last second, over all models; as many as limits allow in one."""

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

    def decide(self, models: Iterable[ObservedModel], limits: Limits, now_ns: int, *, acts: bool) -> list[ModelPlan]:
        """About each model. `acts`: whether the changes are made, so that workers rest after them."""
        plans, memories = [], {}
        left = self._left_alone(now_ns)
        for each in models:
            before = memories[each.model] = self._memories.get(each.model, Memory())
            if each.engine is None:
                plans.append(ModelPlan(each, None))
                continue
            most = self._moves_left(limits, now_ns)
            assigned = assign(
                each.engine,
                each.work,
                [replace(one, pinned=True) if one.id in left else one for one in each.standings],
                before,
                now_ns,
                limits=limits.of(each.model),
                most_moves=most,
            )
            plan = ModelPlan(each, assigned, self._free(assigned.moves), self._free(assigned.budgets))
            plans.append(plan)
            memories[each.model] = assigned.memory if acts else replace(assigned.memory, moved_ns=before.moved_ns)
            if acts:
                self._moved_ns.extend([now_ns] * len(plan.moves))
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

    def done(self, order: Order, assignment: Assignment | None, *, failed: bool = False) -> None:
        """A call has ended; one that changed nothing leaves its worker to the next decision, as if it had not been.
        `failed`: to a later one, as the worker could not be asked."""
        if failed:
            self._failed_ns[order.worker.id] = 0
        wanted = self._wanted.get(order.worker.id)
        if wanted is None or wanted.assignment is not order.wanted:
            return
        if assignment is not None:
            self._wanted[order.worker.id] = _Wanted(wanted.incarnation, assignment, outstanding=False)
            return
        del self._wanted[order.worker.id]
        for model, memory in self._memories.items():
            self._memories[model] = replace(memory, moved_ns=_without(memory.moved_ns, order.worker.id))

    def _left_alone(self, now_ns: int) -> set[str]:
        self._failed_ns = {
            name: at_ns or now_ns for name, at_ns in self._failed_ns.items() if not at_ns or now_ns - at_ns < FAILED_NS
        }
        return set(self._failed_ns)

    def _moves_left(self, limits: Limits, now_ns: int) -> int:
        while self._moved_ns and now_ns - self._moved_ns[0] >= SECOND_NS:
            self._moved_ns.popleft()
        return 0 if limits.quiet(now_ns) else max(limits.moves_per_s - len(self._moved_ns), 0)

    def _free(self, changes: Iterable[Change]) -> list[Change]:
        return [change for change in changes if not self._is_outstanding(change.worker_id)]

    def _is_outstanding(self, worker_id: str) -> bool:
        wanted = self._wanted.get(worker_id)
        return wanted is not None and wanted.outstanding


def _without(moved_ns: Mapping[str, int], worker_id: str) -> Mapping[str, int]:
    return MappingProxyType({name: at_ns for name, at_ns in moved_ns.items() if name != worker_id})
