"""Data-parallel groups, each of which is planned as one worker.

The ranks of a group run their steps in lockstep, so they share one role, and a group is one worker with the GPUs of
all. Groups of equal size are represented by one rank each: a rank does its part of the model's work at a rank's
speed. The largest group defines how many ranks a complete one has. A group that lacks one rank waits for it, and
nothing is decided about it. If groups differ by more, or no complete group has the role of an incomplete one, the
remaining workers do not represent the model. Then nothing is decided about any of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from libs.policy.planner.role_planning import PlannedWorker, RoleOrder
from libs.policy.pressure import Workload

UNEQUAL = "its workers are groups of different sizes"


@dataclass(frozen=True, slots=True)
class GroupedWorkers:
    """A model's workers with one entry per group."""

    workers: Sequence[PlannedWorker]
    """The workers; a group has the id and role of its first rank."""
    ranks: int = 1
    """The number of ranks that each worker stands for."""
    strays: Sequence[RoleOrder] = ()
    """The orders for ranks whose role or budget differs from that of their group's first rank."""
    incomplete: Collection[str] = ()
    """The ranks of groups that lack one, whose work is excluded."""
    unknown: str = ""
    """The reason nothing can be decided about the workers; empty if something can."""


def gather(standings: Sequence[PlannedWorker], groups: Mapping[str, str]) -> GroupedWorkers:
    """Combine one model's workers by group.

    `groups` maps worker ids to group names. A worker without a group forms a group of one.
    """
    if not groups:
        return GroupedWorkers(standings)
    members: dict[str, list[PlannedWorker]] = {}
    for each in standings:
        members.setdefault(groups.get(each.id) or f"/{each.id}", []).append(each)
    found = [sorted(each, key=lambda rank: rank.id) for each in members.values()]
    ranks = max(map(len, found), default=1)
    whole = [each for each in found if len(each) == ranks]
    lacking = [each for each in found if len(each) < ranks]
    roles = {each[0].role for each in whole}
    like_whole = all(len(each) == ranks - 1 and each[0].role in roles for each in lacking)
    return GroupedWorkers(
        [*map(_as_worker, whole), *(_as_worker(each)._replace(movable=False) for each in lacking)],
        ranks,
        [order for each in whole for order in _strays(each)] if like_whole else (),
        {rank.id for each in lacking for rank in each},
        "" if like_whole else UNEQUAL,
    )


def share(work: Workload, ranks: int) -> Workload:
    """Return the part of the work that falls to one rank of each group."""
    if ranks == 1:
        return work
    return replace(
        work,
        prompts=work.prompts / ranks,
        decodes=-(-work.decodes // ranks),
        kv_tokens=-(-work.kv_tokens // ranks),
        waiting_ns=work.waiting_ns / ranks,
        held=-(-work.held // ranks),
        held_kv_tokens=-(-work.held_kv_tokens // ranks),
        held_prompts=work.held_prompts / ranks,
    )


def spread(orders: Iterable[RoleOrder], ranks: Mapping[str, Sequence[str]]) -> list[RoleOrder]:
    """Repeat each order to a group's first rank for all ranks of the group. `ranks` has them by first rank."""
    return [
        order._replace(worker_id=name) for order in orders for name in ranks.get(order.worker_id, [order.worker_id])
    ]


def _as_worker(ranks: Sequence[PlannedWorker]) -> PlannedWorker:
    first = ranks[0]
    if len(ranks) == 1:
        return first
    return first._replace(
        movable=all(each.movable for each in ranks),
        prompt_tokens=sum(each.prompt_tokens for each in ranks),
        kv_tokens=sum(each.kv_tokens for each in ranks),
        pinned=any(each.pinned for each in ranks) or bool(_strays(ranks)),
        keeps_budget=any(each.keeps_budget for each in ranks),
    )


def _strays(ranks: Sequence[PlannedWorker]) -> list[RoleOrder]:
    first = ranks[0]
    return [
        RoleOrder(each.id, first.role, first.budget_tokens)
        for each in ranks[1:]
        if (each.role, each.budget_tokens) != (first.role, first.budget_tokens)
    ]
