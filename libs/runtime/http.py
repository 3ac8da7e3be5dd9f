"""HTTP serving inside a service's own event loop: uvicorn, with the socket bound first so that errors are plain."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from libs.contracts.errors import StartupError
from libs.runtime.tasks import TaskOwner

BACKLOG = 2048


def bind(host: str, port: int, variable: str) -> socket.socket:
    """A listening socket; raises StartupError that names the port and the variable that sets it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:  # the service's own signal handlers stay in place
        yield


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
        http="httptools",
        timeout_graceful_shutdown=drain_s,
        server_header=False,
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
        server.should_exit = True
        await task
        sock.close()
