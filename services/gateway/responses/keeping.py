"""Stored responses, which their tenants retrieve and later responses continue."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import to_builtins

from libs.contracts.errors import ResponseNotFound, StoreUnavailable, UnsupportedField, quoted
from libs.keys.gate import caller_of
from libs.stores.responses import ResponsesDown, ResponseStore
from services.gateway.request.parse import read_headers
from services.gateway.responses.replies import Deleted, Response
from services.gateway.responses.request import Items
from services.gateway.responses.schema import ResponseRequest

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


DECLARED: Final = (
    ("/v1/responses", "Answer a chat as a response that others can go on from.", ResponseRequest, Response),
)
_ABSENT: dict[int | str, dict[str, Any]] = {404: {"description": "None of this tenant is kept by this id."}}


def make_responses_router(kept: KeptResponses) -> APIRouter:
    """Return the routes. Another tenant's response is a 404, for operators and admins too."""
    router = APIRouter(prefix="/v1/responses", tags=["responses"])

    @router.get("/{response_id}", summary="Get a kept response.", responses=_ABSENT)
    async def get(response_id: str, request: Request) -> dict[str, Any]:
        """Return the response as it ended."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedField("stream: a kept response is not streamed again", param="stream")
        return await kept.response(_tenant(request), response_id)

    @router.delete("/{response_id}", summary="Delete a kept response.", responses=_ABSENT)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Delete the response. No further response can continue it."""
        await kept.delete(_tenant(request), response_id)
        found: dict[str, Any] = to_builtins(Deleted(response_id))
        return found

    return router


def _tenant(request: Request) -> str:
    return read_headers(dict(request.scope["headers"]), caller_of(request.scope)).tenant
