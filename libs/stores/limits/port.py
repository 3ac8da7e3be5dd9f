"""The port to the combined use of tenants' limits by all gateways."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from libs.policy.gateway.usage import DAY, MINUTE, Span

Kind = Literal["requests", "tokens", "gpu_ms"]
SPANS: Final[Mapping[Kind, Span]] = {"requests": MINUTE, "tokens": MINUTE, "gpu_ms": DAY}
"""The span over which each kind is limited."""


class LedgerDown(Exception):
    """The ledger does not respond in time. Whether it has counted the call is unknown."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The units granted, and the state of the limit afterwards."""

    granted: int
    left: int
    wait_s: float
    """The time until the least amount requested would fit; 0 if it was granted."""


class Ledger(Protocol):
    """The use of tenants' limits in the last minute or day, running requests, and gateways' reports about tenants.

    Methods raise LedgerDown.
    """

    async def take(self, tenant: str, kind: Kind, limit: int, *, want: int, least: int) -> Grant:
        """Use up to `want` units as far as the limit allows, or none if that is less than `least`."""
        ...

    async def add(self, tenant: str, kind: Kind, units: int) -> None:
        """Add units regardless of the limit; negative ones are returned to it."""
        ...

    async def hold(self, tenant: str, gateway_id: str, limit: int, *, running: int, want: int) -> int:
        """Reserve concurrent requests for the gateway for HOLD_S and return their number.

        It is `want` as far as there is room, and at least `running`.
        """
        ...

    async def beat(self, gateway_id: str) -> int:
        """Register the gateway as alive for HOLD_S, and return the number of live gateways."""
        ...

    async def exchange(self, gateway_id: str, report: bytes) -> Mapping[str, bytes]:
        """Publish this gateway's report on its tenants for REPORT_HOLD_S, and return the others' reports by gateway.

        An empty report publishes nothing. Reports that exceed MAX_REPORT_BYTES together with their gateway's name
        are dropped.
        """
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


HOLD_S = 5.0
"""The time after which a gateway loses what it has not renewed."""
# A report that is not renewed for this long no longer counts. It has to be short, since answers at other gateways give
# way to the tenants that are reported.
REPORT_HOLD_S = 1.0
# Fits about 5,000 tenants of one gateway.
MAX_REPORT_BYTES = 256 * 1024
