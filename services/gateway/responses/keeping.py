"""Stored responses, which their tenants retrieve and later responses continue."""

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
    """The responses in a store, each kept for `keep_s` seconds; 0 keeps none."""

    store: ResponseStore
    keep_s: int
    home: Callable[[str], str] = str
    """Maps a tenant to the name under which its responses are stored, which changes when the tenant is deleted."""

    async def keep(self, tenant: str, items: Items, response: Response) -> bool:
        """Store a response; return False on failure, which does not cost the client its answer."""
        if not self.keep_s:
            return False
        value = msgspec.json.encode({"items": items, "response": response})
        try:
            return await self.store.keep(self.home(tenant), response.id, value, self.keep_s)
        except ResponsesDown:
            return False

    async def items(self, tenant: str, response_id: str) -> Items:
        """Return the conversation through the end of a response; raise ResponseNotFound or StoreUnavailable."""
        kept = await self._kept(tenant, response_id, "previous_response_id")
        items: Items = [*kept.items, *kept.response.get("output", ())]
        return items

    async def response(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Return a response as it ended; raise ResponseNotFound or StoreUnavailable."""
        found: dict[str, Any] = (await self._kept(tenant, response_id, "response_id")).response
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response; raise ResponseNotFound or StoreUnavailable."""
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
