"""Which spare workers take a role, and which return to standby, to reach a number of serving workers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.role_planning import PlannedWorker, RoleOrder
from libs.policy.planner.splits import best_split
from libs.policy.pressure.splits import WorkerProfile, Workload
from libs.policy.roles import Role


@dataclass(frozen=True, slots=True)
class RoleWish:
    """The desired number of a model's workers in a role."""

    serving: int
    spares: frozenset[str]
    """The workers started by an actuator, the only ones that take and leave roles for it."""


def call_up(
    engine: WorkerProfile,
    work: Workload,
    workers: Sequence[PlannedWorker],
    wish: RoleWish,
    limits: ModelLimits,
    *,
    most: int,
) -> list[RoleOrder]:
    """Return the first `most` role changes towards the desired number.

    Of the spare workers that leave, those with the least KV go first. None leaves a role below its limit, or empty.
    """
    serving = [each for each in workers if each.role is not Role.STANDBY]
    ready = [each for each in workers if each.role is Role.STANDBY and each.movable and _is_free(each, wish.spares)]
    if len(serving) < wish.serving:
        return _up(engine, work, serving, ready[: min(wish.serving - len(serving), most)], limits)
    leaving = [each for each in serving if each.movable and _is_free(each, wish.spares)]
    return _down(engine, work, serving, leaving, limits, count=min(len(serving) - wish.serving, most))


def _is_free(worker: PlannedWorker, spares: Collection[str]) -> bool:
    return worker.id in spares and not worker.pinned


def _up(
    engine: WorkerProfile,
    work: Workload,
    serving: Sequence[PlannedWorker],
    coming: Sequence[PlannedWorker],
    limits: ModelLimits,
) -> list[RoleOrder]:
    prefill = sum(each.role is Role.PREFILL for each in serving)
    best = best_split(engine, work, len(serving) + len(coming), limits)
    lacking = max(best.prefill - prefill, 0) if best is not None else 0
    return [
        RoleOrder(each.id, Role.PREFILL, 0) if number < lacking else RoleOrder(each.id, Role.MIXED, engine.chunk_tokens)
        for number, each in enumerate(coming)
    ]


def _down(
    engine: WorkerProfile,
    work: Workload,
    serving: Sequence[PlannedWorker],
    leaving: Sequence[PlannedWorker],
    limits: ModelLimits,
    *,
    count: int,
) -> list[RoleOrder]:
    found: list[RoleOrder] = []
    counts = {role: sum(each.role is role for each in serving) for role in (Role.PREFILL, Role.MIXED)}
    least = {Role.PREFILL: max(limits.prefill_min, min(counts[Role.PREFILL], 1)), Role.MIXED: limits.decode_min}
    best = best_split(engine, work, len(serving) - count, limits) if count > 0 else None
    wanted = {Role.PREFILL: best.prefill, Role.MIXED: best.mixed} if best is not None else least
    # Take from the role with the largest surplus over the best split of the rest, least KV first.
    for each in sorted(leaving, key=lambda each: (each.kv_tokens, each.prompt_tokens)):
        beyond = {role: counts[role] - wanted[role] for role in counts}
        if len(found) < count and counts[each.role] > least[each.role] and beyond[each.role] == max(beyond.values()):
            counts[each.role] -= 1
            found.append(RoleOrder(each.id, Role.STANDBY, 0))
    return found
