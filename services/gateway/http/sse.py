"""Server-sent events and plain JSON answers over ASGI."""

from collections.abc import Mapping

import msgspec
from starlette.types import Send

from libs.contracts.errors import FulcrumError
from services.gateway.http.replies import ErrorBody, ErrorReply
from services.gateway.http.stalls import Patience, Stalled

DONE = b"data: [DONE]\n\n"
# Time for which a client may leave its socket unread before its connection is closed.
WRITE_STALL_S = 120.0
encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """Encode one event. JSON has no bare line break, so an event is one line."""
    return b"data: " + encode(value) + b"\n\n"


def error_reply(error: FulcrumError) -> ErrorReply:
    return ErrorReply(ErrorBody(error.message, error.error_type, error.param, error.code))


class Wire:
    """The ASGI connection on which one answer is sent."""

    def __init__(self, send: Send, patience: Patience) -> None:
        self._send = send
        self._patience = patience

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs.append((b"content-type", content_type.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def part(self, body: bytes, *, more: bool) -> None:
        """Send part of the body, waiting for a slow client. Raise Stalled if the client does not read at all."""
        self._patience.wait(WRITE_STALL_S, Stalled)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._patience.done()

    async def json(self, status: int, value: object, headers: Mapping[str, str]) -> None:
        body = encode(value)
        await self.start(status, "application/json", {**headers, "content-length": str(len(body))})
        await self.part(body, more=False)
