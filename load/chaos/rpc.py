"""gRPC in memory, with the part of grpc.aio that the services use.

Messages are serialised as for a real connection, and arrive in order. TLS, HTTP/2 frames, DNS and channels shared by
calls are not modelled. Every call has its own connection, established in one round trip.
"""

import asyncio
from typing import Any, NamedTuple

import grpc
import grpc.aio

from libs.runtime.net.access import Metadata, bearer
from libs.runtime.net.rpc import TokenInterceptor
from load.chaos.loop import Node
from load.chaos.net import EOF, REFUSED, Net, Pipe


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str


class Call:
    """A call as its client sees it. `_ServerCall` is the other end."""

    def __init__(self, net: Net, client: Node, address: str, method: str, *, codec: Any, metadata: Any) -> None:
        self.net, self.client, self.method, self.metadata = net, client, method, metadata or ()
        self._pack, self._unpack = (each or _as_it_is for each in codec)
        found = net.servers.get(address)
        self.server: Node = found.node if found else Node(f"nobody at {address}")
        name = method.rpartition("/")[2]
        self.up = Pipe(net, name, client, self.server)
        self.down = Pipe(net, name, self.server, client)
        self.handler: asyncio.Task[Any] | None = None
        self._status: _Status | None = None
        self._half_closed = False
        net.calls[self] = None
        # The address is passed rather than the server, because the server may have changed when the connection arrives.
        net.loop.after(net.delay_s(client, self.server), self._connect, address)

    def __str__(self) -> str:
        return f"{self.method} from {self.client} to {self.server}"

    def _connect(self, address: str) -> None:
        if self._status is not None:
            return
        server = self.net.servers.get(address)
        if server is None or server.node is not self.server:
            self.broken(REFUSED)
        else:
            self.handler = server.accept(self)

    # ------------------------------------------------------------ what grpc.aio's client side offers

    async def write(self, message: Any) -> None:
        """Send a message. Raise like grpc.aio if the call has ended."""
        self._check_open()
        await self.up.write(self._pack(message))
        self._check_open()

    async def done_writing(self) -> None:
        if not self._half_closed and self._status is None:
            self._half_closed = True
            self.up.send(EOF)

    async def read(self) -> Any:
        """Return the next message, or EOF at the end. Raise AioRpcError if the call failed."""
        item = await self.down.read()
        if isinstance(item, bytes):
            return self._unpack(item)
        self._finish(item)
        assert self._status is not None
        if self._status.code is grpc.StatusCode.OK:
            return EOF
        if self._status.code is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        raise _error(self._status)

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        if (item := await self.read()) is EOF:
            raise StopAsyncIteration
        return item

    def cancel(self) -> bool:
        """Cancel the call. The server's handler is cancelled when the message arrives."""
        if self._status is not None:
            return False
        self._finish(_Status(grpc.StatusCode.CANCELLED, "Locally cancelled"))
        self.net.loop.after(self.net.delay_s(self.client, self.server), self._abandon)
        return True

    def done(self) -> bool:
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        """Return the status, once the call has ended."""
        while self._status is None:
            await self.read()
        return self._status.code

    async def details(self) -> str:
        """Return the status text, once the call has ended."""
        await self.code()
        assert self._status is not None
        return self._status.details

    # ------------------------------------------------------------ what the world does to it

    def broken(self, why: str) -> None:
        self.net.calls.pop(self, None)
        self.net.log.add(f"{self.client}>{self.server} {self.method} broken: {why}")
        self._abandon()
        self.down.end(_Status(grpc.StatusCode.UNAVAILABLE, why))

    def _abandon(self) -> None:
        self.up.end(EOF)
        if self.handler is not None and not self.server.dead:
            # The handler is cancelled in the server's own turn, so that a frozen server cancels it after it continues.
            self.net.loop.call_soon(self.handler.cancel, context=self.server.context.copy())

    def _finish(self, status: _Status) -> None:
        if self._status is None:
            self._status = status
            self.net.calls.pop(self, None)
            self.down.end(status)
            self.up.end(EOF)

    def _check_open(self) -> None:
        if isinstance(self.down.ended, _Status):
            self._finish(self.down.ended)
        if self._status is not None:
            if self._status.code is grpc.StatusCode.UNAVAILABLE:
                raise _error(self._status)
            raise asyncio.InvalidStateError("RPC already finished.")


def _as_it_is(data: bytes) -> bytes:
    return data


def _error(status: _Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=status.details)


class _ServerCall:
    """The ServicerContext of a call, with the part that the services use."""

    def __init__(self, call: Call, handler: Any) -> None:
        self._call, self._handler = call, handler

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    async def send_initial_metadata(self, metadata: Any) -> None: ...

    async def read(self) -> Any:
        item = await self._call.up.read()
        return (self._handler.request_deserializer or _as_it_is)(item) if isinstance(item, bytes) else EOF

    async def write(self, message: Any) -> None:
        """Send a message once the window has room."""
        call = self._call
        data = (self._handler.response_serializer or _as_it_is)(message)
        if call.net.spoil is not None:
            data = call.net.spoil(call, data)
        await call.down.write(data)

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return an empty context, since no certificates are simulated."""
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _Aborted(code, details)


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = _Status(code, details)


class _Details(NamedTuple):
    method: str
    invocation_metadata: Any


class SimServer:
    def __init__(self, net: Net, node: Node, address: str, token: str) -> None:
        self.net, self.node, self.address = net, node, address
        self._interceptor = TokenInterceptor(token, needs_token=lambda _method: True)
        self._generic: list[Any] = []
        self._calls: dict[Call, None] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None: ...

    async def start(self) -> None:
        self.net.servers[self.address] = self

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, let running ones end within `grace` seconds, then cancel the others."""
        if self.net.servers.get(self.address) is self:
            del self.net.servers[self.address]
        tasks = [call.handler for call in self._calls if call.handler is not None]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for call in list(self._calls):
            if call.handler is not None:
                call.handler.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def accept(self, call: Call) -> "asyncio.Task[Any]":
        """Serve a call in a new task on this server's node."""
        self._calls[call] = None
        return self.net.loop.spawn(self.node, self._serve(call))

    async def _serve(self, call: Call) -> None:
        status = _Status(grpc.StatusCode.OK, "")
        try:
            await self._handle(call)
        except _Aborted as aborted:
            status = aborted.status
        except asyncio.CancelledError:
            status = _Status(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
        except Exception as error:
            status = _Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            self.net.faults.append(f"{self.node}: {call.method} raised {error!r}")
        finally:
            self._calls.pop(call, None)
            call.up.end(EOF)
            call.down.send(status)

    async def _handle(self, call: Call) -> None:
        async def find(details: Any) -> Any:
            return next((found for each in self._generic if (found := each.service(details))), None)

        # Its type is for gRPC's threaded server, but handlers here are coroutines.
        handler: Any = await self._interceptor.intercept_service(find, _Details(call.method, call.metadata))  # type: ignore[arg-type]
        if handler is None:
            raise _Aborted(grpc.StatusCode.UNIMPLEMENTED, call.method)
        context = _ServerCall(call, handler)
        if handler.stream_stream is not None:
            await handler.stream_stream(None, context)
        else:
            data = await call.up.read()
            if isinstance(data, bytes):
                answer = await handler.unary_unary(handler.request_deserializer(data), context)
                await call.down.write(handler.response_serializer(answer))


class _Channel:
    """A grpc.aio.Channel from one node to an address."""

    def __init__(self, net: Net, node: Node, address: str) -> None:
        self._net, self._node, self._address = net, node, address
        self._calls: list[Call] = []

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return lambda metadata=None: self._open(method, (request_serializer, response_deserializer), metadata)

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """Return a multicallable that takes `timeout` in seconds."""

        async def ask(request: Any, *, metadata: Any = None, timeout: float | None = None) -> Any:  # noqa: ASYNC109
            call = self._open(method, (request_serializer, response_deserializer), metadata)
            try:
                async with asyncio.timeout(timeout):
                    await call.write(request)
                    await call.done_writing()
                    return await call.read()
            except TimeoutError:
                raise _error(_Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")) from None
            finally:
                call.cancel()

        return ask

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _open(self, method: str, codec: Any, metadata: Any) -> Call:
        self._calls = [call for call in self._calls if not call.done()]
        call = Call(self._net, self._node, self._address, method, codec=codec, metadata=metadata)
        self._calls.append(call)
        return call


class SimTransport:
    """The libs.runtime.transport.Transport of one node."""

    def __init__(self, net: Net, node: Node, token: str) -> None:
        """Create the transport. Its servers require `token` of every call, as beyond loopback."""
        self._net, self._node, self._token = net, node, token

    def channel(self, address: str) -> Any:
        return _Channel(self._net, self._node, address)

    def metadata(self, address: str) -> Metadata:
        return bearer(self._token)

    def server(self, address: str) -> tuple[Any, int]:
        """Return a server and its port. It listens once it has been started."""
        return SimServer(self._net, self._node, address, self._token), int(address.rpartition(":")[2])

    def http(self, app: Any, sock: Any, *, tasks: Any, drain_s: int) -> Any:
        """Serve the app under the node's name."""
        return _Http(self._net, self._node, app)


class _Http:
    def __init__(self, net: Net, node: Node, app: Any) -> None:
        self._net, self._node, self._app = net, node, app

    async def __aenter__(self) -> str:
        self._net.apps[self._node.name] = (self._node, self._app)
        return f"http://{self._node.name}"

    async def __aexit__(self, *error: object) -> None:
        if self._net.apps.get(self._node.name, (None,))[0] is self._node:
            del self._net.apps[self._node.name]
