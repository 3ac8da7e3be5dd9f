"""gRPC and HTTP in memory: streams with seeded delays, bounded windows, cuts, and peers that fall silent.

Messages are serialised as on the wire and arrive in order. What is not modelled: TLS, HTTP/2 frames, DNS, and channels
shared by calls: every call has a connection of its own, established in one round trip.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import grpc
import grpc.aio

from libs.runtime.rpc import KEEPALIVE_MS, TokenInterceptor
from load.chaos.loop import Node, SimLoop

WINDOW_BYTES = 64 * 1024
"""Sent and not read: HTTP/2's default."""
KEEPALIVE_S = 2 * KEEPALIVE_MS / 1000
"""When a peer that answers no ping is given up."""
ORDER_S = 1e-9
"""Between two items of a pipe: timers of the same moment have no order."""
CUT = "cut"
RESET = "connection reset by peer"
REFUSED = "connection refused"
KEEPALIVE = "keepalive timeout"
EOF = grpc.aio.EOF
Break = tuple[grpc.StatusCode, str]


class Log:
    """What happened on the network, as one number: equal logs have equal digests."""

    def __init__(self, loop: SimLoop, tell: Callable[[str], None] | None) -> None:
        self._loop = loop
        self._tell = tell
        self.digest = 0
        self.events = 0

    def add(self, text: str, *, loud: bool = False) -> None:
        """Enter an event; a loud one is shown to who follows the run."""
        self.events += 1
        line = f"{self._loop.time():.6f} {text}"
        self.digest = crc32(line.encode(), self.digest)
        if loud and self._tell is not None:
            self._tell(line)


class Net:
    """All connections."""

    def __init__(self, loop: SimLoop, random: Random, log: Log) -> None:
        self.loop = loop
        self.log = log
        self.random = random
        self.faults: list[str] = []
        """What a server's handler raised and nobody expected."""
        self.servers: dict[str, SimServer] = {}
        self.apps: dict[str, tuple[Node, Any]] = {}
        self.calls: dict[Call, None] = {}
        self.slow_s: dict[str, float] = {}
        """Further delay of what comes from or goes to a node, by its name."""
        self.spoil: Callable[[Call, bytes], bytes] | None = None

    def delay_s(self, one: Node, other: Node) -> float:
        """Of one message on its way."""
        extra_s = self.slow_s.get(one.name, 0.0) + self.slow_s.get(other.name, 0.0)
        return 100e-6 + self.random.expovariate(1 / 200e-6) + extra_s * self.random.random()

    def killed(self, node: Node) -> None:
        """Its kernel resets what was open."""
        for name in [name for name, server in self.servers.items() if server.node is node]:
            del self.servers[name]
        self.apps = {name: found for name, found in self.apps.items() if found[0] is not node}
        self.cut(node, RESET)

    def cut(self, node: Node, why: str) -> None:
        """Break every call from or to a node."""
        for call in [call for call in self.calls if node in (call.client, call.server)]:
            call.broken(why)

    def frozen(self, node: Node) -> None:
        """Peers give it up when it has answered no ping for too long."""
        self.loop.after(KEEPALIVE_S, self._ping, node)

    def _ping(self, node: Node) -> None:
        if node.frozen:
            self.cut(node, KEEPALIVE)


class Pipe:
    """One direction of a call."""

    def __init__(self, net: Net, name: str, source: Node, sink: Node) -> None:
        self._net, self._name, self._source, self._sink = net, name, source, sink
        self._inbox: deque[Any] = deque()
        self._bytes = 0
        self._last_s = 0.0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.ended: object = None

    async def write(self, data: bytes) -> None:
        """Returns when the window has room again, as a send does that is flow-controlled."""
        self._bytes += len(data) + 5
        self.send(data)
        while self._bytes > WINDOW_BYTES and self.ended is None:
            await self._wait()

    def send(self, item: Any) -> None:
        """Put it on its way, behind what was sent before."""
        loop = self._net.loop
        self._last_s = max(self._last_s + ORDER_S, loop.time() + self._net.delay_s(self._source, self._sink))
        loop.call_at(self._last_s, self._arrive, item, context=loop.world)

    async def read(self) -> Any:
        """The next item; `ended` once there is one and nothing is left."""
        while not self._inbox:
            if self.ended is not None:
                return self.ended
            await self._wait()
        item = self._inbox.popleft()
        if isinstance(item, bytes):
            self._bytes -= len(item) + 5
            self._wake()
        return item

    def end(self, why: object) -> None:
        """Nothing more comes after what has arrived."""
        if self.ended is None:
            self.ended = why
            self._wake()

    def _arrive(self, item: Any) -> None:
        if self.ended is None:
            size = f"{len(item)} {crc32(item):08x}" if isinstance(item, bytes) else str(item)
            self._net.log.add(f"{self._source}>{self._sink} {self._name} {size}")
            self._inbox.append(item)
            self._wake()

    async def _wait(self) -> None:
        waiter = self._net.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str


class Call:
    """A call as its client sees it; `_ServerCall` is the other end."""

    def __init__(self, net: Net, client: Node, address: str, method: str, *, codec: Any, metadata: Any) -> None:
        self.net, self.client, self.method, self.metadata = net, client, method, metadata or ()
        self._pack, self._unpack = codec
        found = net.servers.get(address)
        self.server: Node = found.node if found else Node(f"nobody at {address}")
        name = method.rpartition("/")[2]
        self.up = Pipe(net, name, client, self.server)
        self.down = Pipe(net, name, self.server, client)
        self.handler: asyncio.Task[Any] | None = None
        self._status: _Status | None = None
        self._half_closed = False
        net.calls[self] = None
        # By address, not by server: whoever listens there when the connection arrives.
        net.loop.after(net.delay_s(client, self.server), self._connect, address)

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
        """Raises as grpc.aio does for a call that has ended."""
        self._check_open()
        await self.up.write(self._pack(message))
        self._check_open()

    async def done_writing(self) -> None:
        """Half-close."""
        if not self._half_closed and self._status is None:
            self._half_closed = True
            self.up.send(EOF)

    async def read(self) -> Any:
        """The next message or EOF; raises AioRpcError at a bad end."""
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
        """The server's handler is cancelled once it hears of it."""
        if self._status is not None:
            return False
        self._finish(_Status(grpc.StatusCode.CANCELLED, "Locally cancelled"))
        self.net.loop.after(self.net.delay_s(self.client, self.server), self._abandon)
        return True

    def done(self) -> bool:
        """Whether the client knows its end."""
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        """The status, once the call has ended."""
        while self._status is None:
            await self.read()
        return self._status.code

    # ------------------------------------------------------------ what the world does to it

    def broken(self, why: str) -> None:
        """The connection is gone for both ends."""
        self.net.calls.pop(self, None)
        self.net.log.add(f"{self.client}>{self.server} {self.method} broken: {why}")
        self._abandon()
        self.down.end(_Status(grpc.StatusCode.UNAVAILABLE, why))

    def _abandon(self) -> None:
        self.up.end(EOF)
        if self.handler is not None and not self.server.dead:
            # Cancelled in the server's own turn: a frozen one hears of it when it thaws.
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


def _error(status: _Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=status.details)


class _ServerCall:
    """ServicerContext, as far as the services use it."""

    def __init__(self, call: Call, handler: Any) -> None:
        self._call, self._handler = call, handler

    def invocation_metadata(self) -> Any:
        """As the client sent it."""
        return self._call.metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Nobody here reads it."""

    async def read(self) -> Any:
        """The next message or EOF."""
        item = await self._call.up.read()
        return self._handler.request_deserializer(item) if isinstance(item, bytes) else EOF

    async def write(self, message: Any) -> None:
        """Waits for the window."""
        call = self._call
        data = self._handler.response_serializer(message)
        if call.net.spoil is not None:
            data = call.net.spoil(call, data)
        await call.down.write(data)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Ends the handler."""
        raise _Aborted(code, details)


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = _Status(code, details)


class _Details(NamedTuple):
    method: str
    invocation_metadata: Any


class SimServer:
    """grpc.aio.Server of one node."""

    def __init__(self, net: Net, node: Node, address: str, token: str) -> None:
        self.net, self.node, self.address = net, node, address
        self._interceptor = TokenInterceptor(token)
        self._generic: list[Any] = []
        self._calls: dict[Call, None] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """As in grpc.aio."""
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """The generic ones serve."""

    async def start(self) -> None:
        """Listen."""
        self.net.servers[self.address] = self

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, let running ones end for a while, then cancel them."""
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
        """Serve a call in a task of this node's."""
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

        handler = await self._interceptor.intercept_service(find, _Details(call.method, call.metadata))  # type: ignore[arg-type]
        if handler is None:
            raise _Aborted(grpc.StatusCode.UNIMPLEMENTED, call.method)
        context = _ServerCall(call, handler)
        if handler.stream_stream is not None:
            await handler.stream_stream(None, context)
        else:
            data = await call.up.read()
            if isinstance(data, bytes):
                unpack = handler.request_deserializer
                request = unpack(data) if unpack else data
                answer = await handler.unary_unary(request, context)
                await call.down.write(handler.response_serializer(answer))


class _Channel:
    """grpc.aio.Channel from one node to an address."""

    def __init__(self, net: Net, node: Node, address: str) -> None:
        self._net, self._node, self._address = net, node, address
        self._calls: list[Call] = []

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A multicallable."""
        return lambda metadata=None: self._open(method, (request_serializer, response_deserializer), metadata)

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A multicallable that takes `timeout` in seconds."""

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
        """Cancel what is open."""
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
    """libs.runtime.transport.Transport for one node."""

    def __init__(self, net: Net, node: Node) -> None:
        self._net, self._node = net, node

    def channel(self, address: str) -> Any:
        """To whoever listens there."""
        return _Channel(self._net, self._node, address)

    def server(self, address: str, *, token: str = "") -> tuple[Any, int]:
        """Listens once it is started."""
        return SimServer(self._net, self._node, address, token), int(address.rpartition(":")[2])

    def http(self, app: Any, sock: Any, *, tasks: Any, drain_s: int) -> Any:
        """The app by the node's name."""
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
