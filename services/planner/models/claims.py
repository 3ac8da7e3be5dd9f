"""What the catalogue keeps for models, as it is weighed against other claims. Pure."""

from typing import Final

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
    """Of the day, UTC."""
    return unix_ns // (60 * SECOND_NS) % DAY_MINUTES
