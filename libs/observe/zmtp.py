"""A subscriber to ZeroMQ publishers: ZMTP 3.0 over TCP without authentication, as in RFC 23 of ZeroMQ."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from libs.contracts.errors import InvalidRequest

CONNECT_S: Final = 2.0
MAX_FRAME_BYTES: Final = 64 * 1024
MAX_PARTS: Final = 8
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
_MORE, _LONG, _COMMAND = 1, 2, 4


async def subscribed(endpoint: str, topic: bytes) -> AsyncIterator[list[bytes]]:
    """Yield the messages of a topic until the publisher ends. Raise OSError, TimeoutError and InvalidRequest."""
    host, port = host_and_port(endpoint)
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_FRAME_BYTES)
    try:
        with suppress(asyncio.IncompleteReadError):
            async with asyncio.timeout(CONNECT_S):
                await _shake_hands(reader, writer, topic)
            while True:
                yield await _message(reader)
    finally:
        writer.close()


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split `tcp://host:port`. Raise InvalidRequest."""
    with suppress(ValueError):
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise InvalidRequest(f"{endpoint[:80]!r} is no address like tcp://host:port")


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, topic: bytes) -> None:
    writer.write(_GREETING)
    greeting = await reader.readexactly(len(_GREETING))
    if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:32].rstrip(b"\0") != b"NULL":
        raise InvalidRequest("the publisher does not speak ZMTP 3 without authentication")
    writer.write(bytes((_COMMAND, len(_READY))) + _READY)
    flags, body = await _frame(reader)
    if not flags & _COMMAND or not body.startswith(b"\x05READY"):
        raise InvalidRequest("the publisher refused the subscription")
    # A subscription is an ordinary message in version 3.0, which is what the greeting says.
    writer.write(bytes((0, len(topic) + 1)) + b"\x01" + topic)
    await writer.drain()


async def _message(reader: asyncio.StreamReader) -> list[bytes]:
    parts: list[bytes] = []
    while len(parts) < MAX_PARTS:
        flags, body = await _frame(reader)
        if flags & _COMMAND:
            continue
        parts.append(body)
        if not flags & _MORE:
            return parts
    raise InvalidRequest(f"a message has over {MAX_PARTS} parts")


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    flags = (await reader.readexactly(1))[0]
    length = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
    if length > MAX_FRAME_BYTES:
        raise InvalidRequest(f"a frame has {length} bytes, more than {MAX_FRAME_BYTES}")
    return flags, await reader.readexactly(length)
