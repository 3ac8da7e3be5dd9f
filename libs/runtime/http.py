"""HTTP serving inside a service's own event loop: uvicorn, with the socket bound first so that errors are plain."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from libs.contracts.errors import InvalidRequest, StartupError
from libs.runtime.keepalive import end_when_vanished
from libs.runtime.tasks import TaskOwner

BACKLOG = 2048
STALL_S = 30
"""How long a peer may take no byte that waits for it, or leave the network unanswered."""
SEND_BUFFER_BYTES = 128 * 1024
"""Of each connection, in the kernel, which would let it grow to megabytes for a peer that does not read."""


def bind(host: str, port: int, variable: str, *, stall_s: int = STALL_S) -> socket.socket:
    """A listening socket; raises StartupError that names the port and the variable that sets it.

    The kernel ends connections whose peer has vanished or reads nothing for `stall_s`, where it knows how to.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    end_when_vanished(sock, stall_s)  # closing alone would wait for ever for a peer that answers but does not read
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use: stop what holds it or set {variable}") from None
        raise StartupError(
            f"cannot listen on {host}:{port} ({error.strerror}): set {variable} or FULCRUM_HOST"
        ) from None
    sock.setblocking(False)
    return sock


DATE_S = 1.0
"""How old the date in answers may be."""


class _Server(uvicorn.Server):
    """Is told when to end, where uvicorn's own looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Take no more requests, let those that run end."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:  # the service's own signal handlers stay in place
        yield


class _Answer(asyncio.Transport):
    """One answer's way to its client: its head leaves with what follows in the same turn of the loop, or by itself
    after it. uvicorn writes it by itself, which costs a system call and wakes the client for nothing."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        """Held back; empty once it has left, None before it has come."""

    def write(self, data: Any) -> None:
        """The first call brings the head."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is."""
        return self._transport.is_closing()

    def close(self) -> None:
        """End the connection once all is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class _Protocol(HttpToolsProtocol):
    """Answers what is no HTTP in the shape of the API's errors, and gives up all that a lost client has asked for.

    uvicorn looks after the last of several pipelined requests only; the answer of another would go to a closed
    connection, which is an error in uvloop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles: list[RequestResponseCycle] = []

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None and self.cycle not in self._cycles:
            self.cycle.transport = _Answer(self.transport, self.loop)
            self._cycles.append(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            self.transport.write(_bad_request(msg))
        self._give_up()
        self.transport.close()

    def _give_up(self) -> None:
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()


def _bad_request(message: str) -> bytes:
    error = {"message": message, "type": InvalidRequest.error_type, "param": None, "code": InvalidRequest.code}
    body = msgspec.json.encode({"error": error})
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


@contextlib.asynccontextmanager
async def serve_http(app: Any, sock: socket.socket, *, tasks: TaskOwner, drain_s: int = 5) -> AsyncIterator[str]:
    """Serve the ASGI app on a bound socket while the context is open; yields the base URL.

    A server that ends before is a failure of `tasks`. It is not one of them, since it must outlive them to drain.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        http=_Protocol,
        timeout_graceful_shutdown=drain_s,
        server_header=False,
        proxy_headers=False,  # nobody asks who the client is
        ws="none",
        timeout_keep_alive=75,
    )
    server = _Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]), name="http")

    def ended(done: "asyncio.Task[None]") -> None:
        if not server.should_exit and not done.cancelled():
            tasks.fail(done.exception() or RuntimeError("the HTTP server ended by itself"), "http")

    try:
        while not server.started:
            if task.done():
                await task
                raise StartupError("the HTTP server ended before it started")
            await asyncio.sleep(0.005)
        task.add_done_callback(ended)
        host, port = sock.getsockname()[:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.end()
        await task
        sock.close()
