"""The route through which observed servers report their own steps."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from libs.contracts.errors import BodyTooLarge, FulcrumError, UnsupportedMediaType
from services.metrics.http.login import REPORTS_PATH
from services.metrics.observed.run import ObservedFleet

CONTENT_TYPE: Final = "application/x-protobuf"
MAX_BODY_BYTES: Final = 2 * 1024 * 1024

Admit = Callable[[str, str], None]
"""Raises Unauthenticated or PermissionDenied, given the authorization header and the name of the action."""


def reports_router(observed: ObservedFleet, admit: Admit) -> APIRouter:
    router = APIRouter()

    # OpenAPI cannot describe a body in protobuf's encoding.
    @router.post(REPORTS_PATH, status_code=204, include_in_schema=False)
    async def report(request: Request) -> Response:
        """Enter the steps of one engine, a StepBatch of proto/fulcrum/telemetry."""
        try:
            admit(request.headers.get("authorization", ""), "reporting steps")
            # Browsers ask before they send this type to another origin.
            if request.headers.get("content-type", "").partition(";")[0].strip() != CONTENT_TYPE:
                raise UnsupportedMediaType(f"{REPORTS_PATH} takes {CONTENT_TYPE}")
            body = await _body(request)
        except FulcrumError as error:
            observed.reports.refused(error)
            raise
        observed.report(body)
        return Response(status_code=204)

    return router


async def _body(request: Request) -> bytes:
    """Read the body. Raise BodyTooLarge."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"a report has at most {MAX_BODY_BYTES} bytes")
    return bytes(found)
