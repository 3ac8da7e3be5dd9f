"""The port to what all gateways together have used of tenants' limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from libs.policy.limits.usage import DAY, MINUTE, Span

Kind = Literal["requests", "tokens", "gpu_ms"]
SPANS: Final[Mapping[Kind, Span]] = {"requests": MINUTE, "tokens": MINUTE, "gpu_ms": DAY}
"""In which each is limited."""


class LedgerDown(Exception):
    """The ledger does not answer in time: whether it has counted is not known."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What was granted, and how the limit stands after it."""

    granted: int
    left: int
    wait_s: float
    """Until what was asked for at least fits; 0 where it was granted."""


class Ledger(Protocol):
    """Use of tenants' limits in the last minute or day, requests that run, and what gateways say of their tenants.
    Raises LedgerDown."""

    async def take(self, tenant: str, kind: Kind, limit: int, *, want: int, least: int) -> Grant:
        """Use up to `want` units as far as the limit allows, or none where that is under `least`."""
        ...

    async def add(self, tenant: str, kind: Kind, units: int) -> None:
        """Count units whatever the limit; below 0 they are given back."""
        ...

    async def hold(self, tenant: str, gateway_id: str, limit: int, *, running: int, want: int) -> int:
        """Places for requests at once that the gateway holds from now on for HOLD_S: `want` of them as far as there is
        room, and at least `running`."""
        ...

    async def beat(self, gateway_id: str) -> int:
        """Say that the gateway lives, for HOLD_S; how many do."""
        ...

    async def exchange(self, gateway_id: str, report: bytes) -> Mapping[str, bytes]:
        """Leave for the other gateways what tenants have at this one, for REPORT_HOLD_S; empty: nothing. What others
        left, by gateway; what takes more than MAX_REPORT_BYTES with its gateway's name is dropped."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


HOLD_S = 5.0
"""After this a gateway that has not renewed what it holds has lost it."""
REPORT_HOLD_S = 1.0
"""After this a gateway that has said nothing of its tenants is gone: others' answers give way to what it reported."""
MAX_REPORT_BYTES = 256 * 1024
"""About 5,000 tenants of one gateway."""
