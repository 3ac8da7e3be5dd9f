"""`GET` and `DELETE /v1/responses/ID`."""

from typing import Any, Final

from fastapi import APIRouter, Request
from msgspec import to_builtins

from libs.contracts.errors import UnsupportedField
from libs.keys.gate import caller_of
from services.gateway.prompt.headers import read_headers
from services.gateway.responses.keeping import KeptResponses
from services.gateway.responses.replies import Deleted, Response
from services.gateway.responses.schema import ResponseRequest

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
