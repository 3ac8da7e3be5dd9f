"""Figures of data-parallel groups in a window, summed over their ranks. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from libs.telemetry.members import group_name
from services.metrics.accounting.answer import GroupOccupancy, WorkerOccupancy, kv_used, share
from services.metrics.accounting.phase_windows import WorkerTime, total


class KnownIdle(NamedTuple):
    """Parts of a worker's idle time in GPU-nanoseconds, each at most all of it. They may overlap."""

    starved_ns: int = 0
    dummy_ns: int = 0

    def plus(self, other: "KnownIdle") -> "KnownIdle":
        return KnownIdle(self.starved_ns + other.starved_ns, self.dummy_ns + other.dummy_ns)


def groups_of(
    spent: Sequence[WorkerTime], workers: Sequence[WorkerOccupancy], idle: Mapping[str, KnownIdle]
) -> list[GroupOccupancy]:
    """Return the groups by model and name.

    `workers` match `spent` in order. `idle` holds the idle parts by id of the workers that this instance reads.
    """
    ranks: dict[tuple[str, str], list[tuple[WorkerTime, WorkerOccupancy]]] = {}
    for time, worker in zip(spent, workers, strict=True):
        if worker.group:
            ranks.setdefault((worker.model, worker.group), []).append((time, worker))
    return [_group(*name, members, idle) for name, members in sorted(ranks.items())]


def _group(
    model: str, name: str, members: Sequence[tuple[WorkerTime, WorkerOccupancy]], idle: Mapping[str, KnownIdle]
) -> GroupOccupancy:
    times, ranks = [time for time, _ in members], [worker for _, worker in members]
    whole = total(times)
    known: KnownIdle | None = KnownIdle()
    for rank in ranks:
        here = idle.get(rank.id)
        known = known.plus(here) if known is not None and here is not None else None
    covered_ns = whole.time.covered_ns
    facts = [time.facts for time in times if time.facts.kv_blocks]
    return GroupOccupancy.of(
        whole,
        model=model,
        group=name,
        scope=f"group:{group_name(model, name)}",
        role=ranks[0].role,
        ranks=[rank.id for rank in ranks],
        running=sum(rank.running for rank in ranks),
        waiting=sum(rank.waiting for rank in ranks),
        waiting_prefill_tokens=sum(rank.waiting_prefill_tokens for rank in ranks),
        awaiting_kv=sum(rank.awaiting_kv for rank in ranks),
        places=sum(rank.places for rank in ranks),
        starved=known and share(known.starved_ns, covered_ns),
        dummy=known and share(known.dummy_ns, covered_ns),
        dummy_gpu_ns=known and known.dummy_ns,
        dummy_steps=sum(rank.dummy_steps for rank in ranks),
        kv_used=kv_used(
            sum(min(each.load.free_kv_blocks, each.kv_blocks) for each in facts), sum(each.kv_blocks for each in facts)
        ),
    )
