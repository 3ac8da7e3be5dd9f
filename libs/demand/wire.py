"""Conversion of demand totals to and from protobuf."""

from collections.abc import Mapping
from typing import Final

from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandCount, DemandTotals
from libs.demand.counts import MAX_ROWS, OTHER, Counts, DemandKey
from libs.demand.fold import GatewayKey, Mark

MAX_NAME_CHARS: Final = 200


def totals_message(
    gateway: GatewayKey,
    at_ns: int,
    rows: Mapping[DemandKey, Counts],
    queue_full: Mapping[DemandKey, int] | None = None,
    *,
    last: bool = False,
) -> DemandTotals:
    """Encode a gateway's totals; `queue_full` counts refusals by a full queue, by row."""
    full = queue_full or {}
    counts = [
        DemandCount(
            model=key.model,
            service_class=key.service_class,
            tenant=key.tenant,
            queue_full=full.get(key, 0),
            **row._asdict(),
        )
        for key, row in rows.items()
    ]
    return DemandTotals(gateway_id=gateway[0], incarnation=gateway[1], told_unix_ns=at_ns, counts=counts, last=last)


def mark_of(message: DemandTotals) -> tuple[GatewayKey, Mark]:
    """Decode a gateway's totals; repeated rows are merged."""
    rows: dict[DemandKey, Counts] = {}
    for each in message.counts[: MAX_ROWS * 2]:
        names = (each.model, each.service_class, each.tenant)
        key = DemandKey(*(name[:MAX_NAME_CHARS] or OTHER for name in names))
        rows[key] = Counts(*(getattr(each, name) for name in Counts._fields))
    return (message.gateway_id, message.incarnation), Mark(message.told_unix_ns, rows)
