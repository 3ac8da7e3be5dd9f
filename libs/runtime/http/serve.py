"""Binding of sockets, so that errors are plain, and HTTP serving over them inside a service's own event loop."""

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import uvicorn

from libs.contracts.errors import StartupError
from libs.runtime.http.connection import Connection
from libs.runtime.http.settings import ConnectionGuard
from libs.runtime.net.ports import bind_free, end_when_vanished
from libs.runtime.tasks import TaskOwner

# Bounds the age of the date in responses, and how late a bound on time is enforced.
TICK_S = 1.0


class _Server(uvicorn.Server):
    """A uvicorn server that ends on an event, where uvicorn's own polls ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Accept no more requests and let running ones end."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            now_s = loop.time()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.sweep(now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:  # the service's own signal handlers stay in place
        yield


@contextlib.asynccontextmanager
async def serve_http(
    app: Any, sock: socket.socket, *, tasks: TaskOwner, drain_s: int = 5, guard: ConnectionGuard | None = None
) -> AsyncIterator[str]:
    """Serve the ASGI app on a bound socket while the context is open, and yield the base URL.

    A server that ends earlier fails `tasks`. It is not one of them, since it must outlive them to drain.
    """
    guard = guard or ConnectionGuard()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        http=partial(Connection, guard=guard),  # type: ignore[arg-type]  # it is only called
        timeout_graceful_shutdown=drain_s,
        server_header=False,
        proxy_headers=bool(guard.proxies),
        forwarded_allow_ips=list(guard.proxies),
        ws="none",
        timeout_keep_alive=math.ceil(guard.bounds.idle_s + 2 * TICK_S),  # later than the sweep, which decides better
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


BACKLOG = 2048
# The longest time that a peer may accept no pending byte, or not answer the network.
STALL_S = 30
# Send buffer of each connection in the kernel, which would let it grow to megabytes for a peer that does not read.
SEND_BUFFER_BYTES = 128 * 1024


def bind(host: str, port: int, variable: str, *, stall_s: int = STALL_S) -> socket.socket:
    """Return a listening socket. Raise StartupError that names the port and the variable that sets it.

    Port 0 picks a port that the kernel gives to no outgoing connection, so that a restart can bind it again. Where the
    kernel supports it, a connection ends once its peer has vanished or has read nothing for `stall_s`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    end_when_vanished(sock, stall_s)  # closing alone would wait for ever for a peer that answers but does not read
    try:
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        else:
            bind_free(sock, host)
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
