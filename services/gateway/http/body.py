from collections.abc import Mapping

from starlette.types import Receive

from libs.contracts.errors import InvalidRequest
from libs.contracts.http_errors import BodyTooLarge
from services.gateway.http.stalls import Patience, Stalls

# Time that a client has to send its whole body.
BODY_TIMEOUT_S = 30.0


class ClientGone(Exception):
    pass


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], max_bytes: int, patience: Patience, stalls: Stalls
) -> bytes:
    """Return the whole body.

    Raise BodyTooLarge or QueueFull without reading further, and ClientGone if the client disconnects. `patience`
    bounds the time, `stalls` the size of all open bodies together.
    """
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
