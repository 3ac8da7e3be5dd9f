"""The network as services use it, for gRPC and HTTP. A simulation brings its own (load/chaos)."""

import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from libs.contracts.errors import FulcrumError
from libs.runtime.http import ConnectionGuard, serve_http
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import Metadata, call_metadata
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner

if TYPE_CHECKING:
    import grpc.aio


class Transport(Protocol):
    """Everything that leaves a gateway or a worker for another process, except through the stores' ports."""

    def channel(self, address: str) -> "grpc.aio.Channel":
        """Return a channel to another process of the suite."""
        ...

    def metadata(self, address: str) -> Metadata:
        """Return the metadata that authenticates each call over a channel to `address`."""
        ...

    def server(self, address: str) -> "tuple[grpc.aio.Server, int]":
        """Return a gRPC server bound to `address`, which admits authorized callers only, and its port. Raise
        StartupError.
        """
        ...

    def http(
        self, app: Any, sock: socket.socket, *, tasks: TaskOwner, drain_s: int
    ) -> AbstractAsyncContextManager[str]:
        """Serve an ASGI app on a bound socket while the context is open, and yield the base URL."""
        ...


class SystemTransport:
    """gRPC and uvicorn over the machine's network."""

    def __init__(self, settings: CommonSettings, guard: ConnectionGuard | None = None) -> None:
        """`guard` bounds HTTP connections, if there are any."""
        self._settings = settings
        self._guard = guard

    def channel(self, address: str) -> "grpc.aio.Channel":
        from libs.runtime.net.rpc import make_channel  # noqa: PLC0415 (9 MiB, which the metrics service does not need)

        return make_channel(self._settings, address)

    def metadata(self, address: str) -> Metadata:
        return call_metadata(self._settings, address)

    def server(self, address: str) -> "tuple[grpc.aio.Server, int]":
        from libs.runtime.net.rpc import make_server  # noqa: PLC0415

        return make_server(self._settings, address)

    def http(
        self, app: Any, sock: socket.socket, *, tasks: TaskOwner, drain_s: int
    ) -> AbstractAsyncContextManager[str]:
        return serve_http(app, sock, tasks=tasks, drain_s=drain_s, guard=self._guard)


def guarded_transport(
    settings: HttpSettings,
    metrics: CollectorRegistry,
    on_refusal: Callable[[FulcrumError], None] | None = None,
    error_body: Callable[[FulcrumError, str], object] | None = None,
) -> SystemTransport:
    """Return the transport of a service with an HTTP port, whose connections are bounded and counted in `metrics`.

    `on_refusal` is called with the error of each request or connection that is refused before any route sees it.
    `error_body` returns what its client gets, by the request's path.
    """
    guard = settings.http_guard()
    guard.error_body = error_body or guard.error_body
    guard.on_refusal = on_refusal or guard.on_refusal
    metrics.register(guard)
    return SystemTransport(settings, guard)
