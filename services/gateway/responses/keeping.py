"""Responses as their tenants get them again, and as later ones go on from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from libs.contracts.errors import ResponseNotFound, StoreUnavailable, quoted
from libs.stores.responses.port import ResponsesDown, ResponseStore
from services.gateway.responses.replies import Response
from services.gateway.responses.request import Items

_AWAY = "where responses are kept does not answer"
RETRY_AFTER_S = 1.0


class _Kept(msgspec.Struct):
    items: list[Any]
    response: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponses:
    """Over their store, for `keep_s` each; 0: none is kept."""

    store: ResponseStore
    keep_s: int
    home: Callable[[str], str] = str
    """The name under which a tenant's are kept: another one after it was deleted."""

    async def keep(self, tenant: str, items: Items, response: Response) -> bool:
        """False where that could not be: the answer is not lost by it."""
        if not self.keep_s:
            return False
        value = msgspec.json.encode({"items": items, "response": response})
        try:
            return await self.store.keep(self.home(tenant), response.id, value, self.keep_s)
        except ResponsesDown:
            return False

    async def items(self, tenant: str, response_id: str) -> Items:
        """The conversation up to the end of a response; raises ResponseNotFound, StoreUnavailable."""
        kept = await self._kept(tenant, response_id, "previous_response_id")
        items: Items = [*kept.items, *kept.response.get("output", ())]
        return items

    async def response(self, tenant: str, response_id: str) -> dict[str, Any]:
        """As it ended; raises ResponseNotFound, StoreUnavailable."""
        found: dict[str, Any] = (await self._kept(tenant, response_id, "response_id")).response
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFound, StoreUnavailable."""
        try:
            found = await self.store.delete(self.home(tenant), response_id)
        except ResponsesDown:
            raise StoreUnavailable(_AWAY, retry_after_s=RETRY_AFTER_S) from None
        if not found:
            raise _absent(response_id, "response_id")

    async def _kept(self, tenant: str, response_id: str, field: str) -> _Kept:
        try:
            value = await self.store.get(self.home(tenant), response_id)
        except ResponsesDown:
            raise StoreUnavailable(_AWAY, retry_after_s=RETRY_AFTER_S) from None
        if value is None:
            raise _absent(response_id, field)
        try:
            return msgspec.json.decode(value, type=_Kept)
        except msgspec.MsgspecError:  # a stranger's
            raise _absent(response_id, field) from None


def _absent(response_id: str, field: str) -> ResponseNotFound:
    return ResponseNotFound(f"response {quoted(response_id)} is not kept", param=field)
