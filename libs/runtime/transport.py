"""The network as services use it: what carries gRPC and HTTP. A simulation brings another (load/chaos)."""

import socket
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry

from libs.runtime.http import ConnectionGuard, serve_http
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import Metadata, call_metadata
from libs.runtime.net.rpc import make_channel, make_server
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner


class Transport(Protocol):
    """Everything that leaves a gateway or a worker for another process, except through the stores' ports."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to another process of the suite."""
        ...

    def metadata(self, address: str) -> Metadata:
        """What each call over a channel to `address` brings along: who calls."""
        ...

    def server(self, address: str) -> tuple[grpc.aio.Server, int]:
        """A gRPC server bound to `address`, which lets in who may call it, and its port. Raises StartupError."""
        ...

    def http(
        self, app: Any, sock: socket.socket, *, tasks: TaskOwner, drain_s: int
    ) -> AbstractAsyncContextManager[str]:
        """Serve an ASGI app on a bound socket while the context is open; yields the base URL."""
        ...


class SystemTransport:
    """gRPC and uvicorn over the machine's network."""

    def __init__(self, settings: CommonSettings, guard: ConnectionGuard | None = None) -> None:
        """`guard`: over HTTP connections, where there are any."""
        self._settings = settings
        self._guard = guard

    def channel(self, address: str) -> grpc.aio.Channel:
        """With TLS where the settings say so."""
        return make_channel(self._settings, address)

    def metadata(self, address: str) -> Metadata:
        """The token, where the settings have one and let it travel."""
        return call_metadata(self._settings, address)

    def server(self, address: str) -> tuple[grpc.aio.Server, int]:
        """Port 0 picks one."""
        return make_server(self._settings, address)

    def http(
        self, app: Any, sock: socket.socket, *, tasks: TaskOwner, drain_s: int
    ) -> AbstractAsyncContextManager[str]:
        """uvicorn inside this event loop."""
        return serve_http(app, sock, tasks=tasks, drain_s=drain_s, guard=self._guard)


def guarded_transport(settings: HttpSettings, metrics: CollectorRegistry) -> SystemTransport:
    """For a service with an HTTP port; its connections are bounded, and counted among `metrics`."""
    guard = settings.http_guard()
    metrics.register(guard)
    return SystemTransport(settings, guard)
