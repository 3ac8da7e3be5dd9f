"""A TCP proxy between two parties of a test, which can let them vanish: neither data nor an end arrives any more."""

import asyncio
import ctypes
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 64 * 1024


class VanishingProxy:
    """A forwarder to `target` until it vanishes; then the kernel's buffers take what is still sent."""

    def __init__(self) -> None:
        self.target = ""
        """HOST:PORT; may be set once the proxy's own address is known."""
        self.address = ""
        self.forwards = asyncio.Event()
        """Clear it to stop forwarding in both directions; connections stay open, and new ones are accepted."""
        self.forwards.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self.target.rpartition(":")
        with suppress(OSError, asyncio.CancelledError):
            await self.forwards.wait()
            there, back = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
            finally:
                back.transport.abort()
        writer.transport.abort()
        self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self.forwards.wait()
            writer.write(data)
            await writer.drain()
        await self.forwards.wait()
        raise ConnectionResetError

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def vanishing_proxy(target: str = "") -> AsyncIterator[VanishingProxy]:
    """Run a proxy on loopback while the context is open."""
    proxy = VanishingProxy()
    proxy.target = target
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


SO_ATTACH_FILTER = 26
"""Socket options of Linux, from asm-generic/socket.h."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A struct sock_filter that returns 0 bytes of each packet."""


def vanish(sock: socket.socket) -> None:
    """Make the kernel drop whatever arrives for a connected socket, without acknowledgements.

    The socket stays open, since closing it would send an end.
    """
    code = ctypes.create_string_buffer(_DROP_ALL)
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))
