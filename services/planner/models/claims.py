"""GPU claims of catalogue entries, and the GPUs that they compete for. Pure."""

from collections.abc import Sequence
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.policy.reserve.booking import GpuClaim
from libs.stores.catalogue import DAY_MINUTES, ModelEntry

SECOND_NS: Final = 1_000_000_000


def claims_of(entry: ModelEntry) -> list[GpuClaim]:
    """Return the reservations, floor and pin of one model as claims."""
    claims = [
        GpuClaim(entry.name, each.gpus, "reservation", each.from_minute, each.to_minute, entry.priority)
        for each in entry.reservations
    ]
    if entry.floor:
        claims.append(GpuClaim(entry.name, entry.floor, "floor", priority=entry.priority))
    if entry.pinned:
        claims.append(GpuClaim(entry.name, 1, "pin", priority=entry.priority))
    return claims


def minute_of(unix_ns: int) -> int:
    """Return the minute of the day, UTC."""
    return unix_ns // (60 * SECOND_NS) % DAY_MINUTES


def gpu_of(worker: Worker) -> str:
    """Return a name for the GPU that a worker shares with others; empty if it has its own."""
    return f"{worker.node}/{','.join(worker.gpu_uuids)}" if 0 < worker.gpu_share < 1 and worker.gpu_uuids else ""


def devices(workers: Sequence[Worker]) -> int:
    """Count the GPUs under these workers; one that several share counts once."""
    names = [gpu_of(worker) for worker in workers]
    return len(set(names) - {""}) + names.count("")
