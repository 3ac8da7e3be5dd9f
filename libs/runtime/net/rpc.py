"""gRPC servers and channels: TLS from settings, message bounds, keepalive, the token of calls."""

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from libs.contracts.errors import FulcrumError, InvalidRequest, StartupError, Unauthenticated
from libs.runtime.net.access import AUTHORIZATION, bearer, check_listener, needs_token
from libs.runtime.settings import CommonSettings

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 2_000

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    # A keepalive ping joins one that is under way, whose own bound is a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),  # peers are named by address; a proxy variable is meant for other traffic
    # Each channel its own connection: a reconnect must not wait for another channel's back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


def _read(path: str, variable: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"{variable}={path!r} cannot be read: {error.strerror}") from None


def make_server(settings: CommonSettings, address: str) -> tuple[grpc.aio.Server, int]:
    """A server bound to `address` (port 0 picks one) and its port; raises StartupError."""
    check_listener(settings, address)
    guard = TokenInterceptor(
        settings.token.get_secret_value(), needs_token=lambda method: needs_token(settings, address, method)
    )
    server = grpc.aio.server(options=_OPTIONS, interceptors=(guard,))
    try:
        if settings.tls_cert:
            credentials = grpc.ssl_server_credentials(
                [(_read(settings.tls_key, "FULCRUM_TLS_KEY"), _read(settings.tls_cert, "FULCRUM_TLS_CERT"))],
                root_certificates=_read(settings.tls_ca, "FULCRUM_TLS_CA"),
                require_client_auth=True,
            )
            return server, server.add_secure_port(address, credentials)
        return server, server.add_insecure_port(address)
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {address}: the port is in use or the address is not this host's"
        ) from None


def make_channel(settings: CommonSettings, address: str) -> grpc.aio.Channel:
    """A channel to another process of the suite."""
    if settings.tls_cert:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(settings.tls_ca, "FULCRUM_TLS_CA"),
            private_key=_read(settings.tls_key, "FULCRUM_TLS_KEY"),
            certificate_chain=_read(settings.tls_cert, "FULCRUM_TLS_CERT"),
        )
        return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that need the suite's token and do not bring it: once a call, never for its frames."""

    def __init__(self, token: str, *, needs_token: Callable[[str], bool]) -> None:
        """Without a token none of those calls passes."""
        self._expected = bearer(token)[0][1] if token else ""
        self._needs_token = needs_token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Let the call through, or answer UNAUTHENTICATED."""
        if not self._needs_token(str(handler_call_details.method)):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = str(metadata.get(AUTHORIZATION, ""))
        if self._expected and hmac.compare_digest(given.encode(), self._expected.encode()):
            return await continuation(handler_call_details)

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await abort_with(context, Unauthenticated("calls need the suite's token as authorization: Bearer TOKEN"))

        # Of whatever kind the method is: a stream may say nothing before it has heard something.
        return grpc.stream_stream_rpc_method_handler(refuse)


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: FulcrumError) -> None:
    """Answer a call with a typed error: its gRPC status, and "code: message" as details."""
    await context.abort(error.grpc_status, f"{error.code}: {error.message}")


async def read_message(context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
    """The next message of a stream, or EOF; raises InvalidRequest for bytes that are none."""
    try:
        return await context.read()
    except DecodeError as error:
        raise InvalidRequest(str(error)) from None
