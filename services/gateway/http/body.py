"""Reading a request's body within bounds of size and time."""

from collections.abc import Mapping

from starlette.types import Receive

from libs.contracts.errors import InvalidRequest
from libs.contracts.http_errors import BodyTooLarge
from services.gateway.http.stalls import Patience, Stalls

BODY_TIMEOUT_S = 30.0
"""How long a client may take to send its body."""


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], max_bytes: int, patience: Patience, stalls: Stalls
) -> bytes:
    """The whole body. Raises BodyTooLarge and QueueFull without reading on, ClientGone; `patience` bounds the time,
    `stalls` what all bodies take together."""
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
    patience.wait(BODY_TIMEOUT_S, _too_slow)
    parts: list[bytes] = []
    room_bytes = max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        room_bytes -= len(part)
        if room_bytes < 0:
            raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
        stalls.hold(patience, len(part))
        parts.append(part)
        if not message.get("more_body", False):
            patience.done()
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_slow() -> InvalidRequest:
    return InvalidRequest(f"the body did not come within {BODY_TIMEOUT_S:g} s", param="body")
