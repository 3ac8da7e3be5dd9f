"""gRPC servers and channels with TLS from settings, message bounds, keepalive and the token of calls."""

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from libs.contracts.errors import FulcrumError, InvalidRequest, PermissionDenied, StartupError, Unauthenticated
from libs.runtime.net.access import (
    AUTHORIZATION,
    CallSettings,
    CertifiedPeer,
    bearer,
    certified,
    check_listener,
    check_peer,
    needs_token,
)

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


def make_server(settings: CallSettings, address: str) -> tuple[grpc.aio.Server, int]:
    """Return a server bound to `address` (port 0 picks one) and its port. Raise StartupError."""
    check_listener(settings, address)
    guard = TokenInterceptor(
        settings.token.get_secret_value(), needs_token=lambda method: needs_token(settings, address, method)
    )
    try:
        if settings.tls_cert:
            from libs.runtime.net.authority import ListenerFiles  # noqa: PLC0415 (a command without TLS is quick)

            files = ListenerFiles(settings)
            server = grpc.aio.server(options=_OPTIONS, interceptors=(guard, RoleInterceptor(files.own_role())))
            return server, server.add_secure_port(address, files.credentials())
        server = grpc.aio.server(options=_OPTIONS, interceptors=(guard,))
        return server, server.add_insecure_port(address)
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {address}: the port is in use or the address is not this host's"
        ) from None


def make_channel(settings: CallSettings, address: str) -> grpc.aio.Channel:
    """Return a channel to another process of the suite."""
    if settings.tls_cert:
        from libs.runtime.net.authority import channel_credentials  # noqa: PLC0415 (as above)

        return grpc.aio.secure_channel(address, channel_credentials(settings), options=_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses calls that need the suite's token and lack it. It checks each call once, not each
    frame.
    """

    def __init__(self, token: str, *, needs_token: Callable[[str], bool]) -> None:
        """Create an interceptor; without a token it refuses every call that needs one."""
        self._expected = bearer(token)[0][1] if token else ""
        self._needs_token = needs_token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Pass the call through, or answer UNAUTHENTICATED."""
        if not self._needs_token(str(handler_call_details.method)):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        given = [str(value).encode() for key, value in metadata if key == AUTHORIZATION]
        # With two values, a proxy may have checked the other one.
        if self._expected and len(given) == 1 and hmac.compare_digest(given[0], self._expected.encode()):
            return await continuation(handler_call_details)

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await abort_with(context, Unauthenticated("calls need the suite's token as authorization: Bearer TOKEN"))

        # For all kinds of methods: a stream may send nothing until it has received something.
        return grpc.stream_stream_rpc_method_handler(refuse)


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses calls that the role in the caller's certificate may not make."""

    def __init__(self, own: CertifiedPeer | None) -> None:
        self._own = own

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap the handler in the check: the caller is known only once the call begins."""
        handler = await continuation(handler_call_details)
        if handler is None or self._own is None:
            return handler
        check = partial(self._check, str(handler_call_details.method))
        for kind in ("unary_unary", "stream_unary"):
            if (behaviour := getattr(handler, kind)) is not None:
                return _with_behaviour(handler, kind, _checked_answer(behaviour, check))
        for kind in ("unary_stream", "stream_stream"):
            if (behaviour := getattr(handler, kind)) is not None:
                generates = inspect.isasyncgenfunction(behaviour)
                wrapped = _checked_stream(behaviour, check) if generates else _checked_answer(behaviour, check)
                return _with_behaviour(handler, kind, wrapped)
        return handler

    async def _check(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        try:
            check_peer(self._own, peer_of(context), method)
        except PermissionDenied as error:
            await abort_with(context, error)


def peer_of(context: "grpc.aio.ServicerContext[Any, Any]") -> CertifiedPeer | None:
    """Return the role in the caller's certificate; None without TLS, or if the certificate names none."""
    return certified(_uris(context.auth_context()))


def _uris(auth_context: Any) -> Iterable[str]:
    return (name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ()))


def _with_behaviour(handler: Any, kind: str, behaviour: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    made: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{kind}_rpc_method_handler")(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def _checked_answer(behaviour: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    async def checked(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        await check(context)
        return await behaviour(request, context)

    return checked


def _checked_stream(behaviour: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    async def checked(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        await check(context)
        async for each in behaviour(request, context):
            yield each

    return checked


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: FulcrumError) -> None:
    """Answer a call with a typed error: its gRPC status, and "code: message" as details."""
    await context.abort(grpc.StatusCode[error.grpc_status], f"{error.code}: {error.message}")


async def read_message(context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
    """Return the next message of a stream, or EOF. Raise InvalidRequest if its bytes are malformed."""
    try:
        return await context.read()
    except DecodeError as error:
        raise InvalidRequest(str(error)) from None
