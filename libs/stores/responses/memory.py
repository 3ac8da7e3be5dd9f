"""An in-memory store of responses, for gateways without Redis and for simulations."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from libs.stores.responses.port import MAX_RESPONSE_BYTES, MAX_RESPONSES, MAX_TENANT_BYTES

MAX_TENANTS = 256
"""The most tenants with responses at a time; those of the least recently active one make room."""


@dataclass(slots=True)
class _TenantResponses:
    values: OrderedDict[str, tuple[bytes, float]] = field(default_factory=OrderedDict)
    """Value and expiry time by response id, oldest first."""
    size_bytes: int = 0

    def drop(self, response_id: str) -> bool:
        found = self.values.pop(response_id, None)
        if found is not None:
            self.size_bytes -= len(found[0])
        return found is not None


class MemoryResponses:
    """A ResponseStore that lasts as long as its process."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._tenants: OrderedDict[str, _TenantResponses] = OrderedDict()

    async def keep(self, tenant: str, response_id: str, value: bytes, keep_s: int) -> bool:
        if len(value) > MAX_RESPONSE_BYTES:
            return False
        kept = self._tenants.setdefault(tenant, _TenantResponses())
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        now_s = self._now_s()
        for over in [each for each, (_, ends_s) in kept.values.items() if ends_s <= now_s]:
            kept.drop(over)
        kept.drop(response_id)
        while kept.values and (len(kept.values) >= MAX_RESPONSES or kept.size_bytes + len(value) > MAX_TENANT_BYTES):
            kept.drop(next(iter(kept.values)))
        kept.values[response_id] = value, now_s + keep_s
        kept.size_bytes += len(value)
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        kept = self._tenants.get(tenant)
        value, ends_s = kept.values.get(response_id, (None, 0.0)) if kept else (None, 0.0)
        return value if ends_s > self._now_s() else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        stands = await self.get(tenant, response_id) is not None
        if stands:
            self._tenants[tenant].drop(response_id)
        return stands

    async def close(self) -> None:
        # There is no connection to close.
        ...
