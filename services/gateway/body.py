"""Reading a request's body within bounds of size and time."""

import asyncio
from collections.abc import Iterable

from starlette.types import Receive

from libs.contracts.errors import BodyTooLarge, InvalidRequest

BODY_TIMEOUT_S = 30.0
"""How long a client may take to send its body."""


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(receive: Receive, headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge without reading on, InvalidRequest when it takes too long, ClientGone."""
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise InvalidRequest(f"the body did not come within {BODY_TIMEOUT_S:g} s", param="body") from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        if len(body) + len(part) > max_bytes:
            raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
        body = body + part if body else part
        if not message.get("more_body", False):
            return body
