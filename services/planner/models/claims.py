"""What the catalogue keeps for models, and the GPUs that claims are weighed against. Pure."""

from collections.abc import Sequence
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.policy.reserve.booking import GpuClaim
from libs.stores.catalogue.entry import DAY_MINUTES, ModelEntry

SECOND_NS: Final = 1_000_000_000


def claims_of(entry: ModelEntry) -> list[GpuClaim]:
    """What is kept for one model."""
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
    """Minute of the day, UTC."""
    return unix_ns // (60 * SECOND_NS) % DAY_MINUTES


def gpu_of(worker: Worker) -> str:
    """The GPU that it shares with others that name the same; empty where it has its own."""
    return f"{worker.node}/{','.join(worker.gpu_uuids)}" if 0 < worker.gpu_share < 1 and worker.gpu_uuids else ""


def devices(workers: Sequence[Worker]) -> int:
    """GPUs under these workers: one that several share counts once."""
    names = [gpu_of(worker) for worker in workers]
    return len(set(names) - {""}) + names.count("")
