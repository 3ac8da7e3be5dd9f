"""The network: connections with seeded delays, bounded windows, cuts, and peers that fall silent."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol
from zlib import crc32

import grpc.aio

from libs.runtime.net.rpc import KEEPALIVE_MS
from load.chaos.loop import Node, SimLoop

# The upper bound of bytes sent and not read, which is HTTP/2's default.
WINDOW_BYTES = 64 * 1024
# The time after which a peer that answers no ping counts as dead.
KEEPALIVE_S = 2 * KEEPALIVE_MS / 1000
# The minimum time between two items of a pipe. Timers of the same time have no order.
ORDER_S = 1e-9
CUT = "cut"
RESET = "connection reset by peer"
REFUSED = "connection refused"
KEEPALIVE = "keepalive timeout"
EOF = grpc.aio.EOF


class Connection(Protocol):
    @property
    def client(self) -> Node:
        """The node that opened the connection."""
        ...

    @property
    def server(self) -> Node:
        """The node that accepted the connection."""
        ...

    def broken(self, why: str) -> None: ...


class Log:
    """A log of the network's events as one digest. Equal logs have equal digests."""

    def __init__(self, loop: SimLoop, on_line: Callable[[str], None] | None) -> None:
        self._loop = loop
        self._on_line = on_line
        self.digest = 0
        self.events = 0

    def add(self, text: str, *, loud: bool = False) -> None:
        """Add an event. If `loud`, also pass it to `on_line`."""
        self.events += 1
        line = f"{self._loop.time():.6f} {text}"
        self.digest = crc32(line.encode(), self.digest)
        if loud and self._on_line is not None:
            self._on_line(line)


class Net:
    """All connections between nodes, with their delays and faults."""

    def __init__(self, loop: SimLoop, random: Random, log: Log) -> None:
        self.loop = loop
        self.log = log
        self.random = random
        self.faults: list[str] = []
        """The unexpected exceptions of servers' handlers."""
        self.servers: dict[str, Any] = {}
        self.apps: dict[str, tuple[Node, Any]] = {}
        self.calls: dict[Connection, None] = {}
        self.slow_s: dict[str, float] = {}
        """The additional delay of messages from or to a node, by the node's name."""
        self.spoil: Callable[[Any, bytes], bytes] | None = None

    def delay_s(self, one: Node, other: Node) -> float:
        """Draw the delay in seconds of one message between two nodes."""
        extra_s = self.slow_s.get(one.name, 0.0) + self.slow_s.get(other.name, 0.0)
        return 100e-6 + self.random.expovariate(1 / 200e-6) + extra_s * self.random.random()

    def killed(self, node: Node) -> None:
        """Reset every connection of a killed node, as its kernel would."""
        for name in [name for name, server in self.servers.items() if server.node is node]:
            del self.servers[name]
        self.apps = {name: found for name, found in self.apps.items() if found[0] is not node}
        self.cut(node, RESET)

    def cut(self, node: Node, why: str) -> None:
        """Break every connection from or to a node."""
        for call in [call for call in self.calls if node in (call.client, call.server)]:
            call.broken(why)

    def frozen(self, node: Node) -> None:
        """Break a node's connections if it stays frozen for longer than the keepalive."""
        self.loop.after(KEEPALIVE_S, self._ping, node)

    def _ping(self, node: Node) -> None:
        if node.frozen:
            self.cut(node, KEEPALIVE)


class Pipe:
    def __init__(self, net: Net, name: str, source: Node, sink: Node) -> None:
        self._net, self._name, self._source, self._sink = net, name, source, sink
        self._inbox: deque[Any] = deque()
        self._bytes = 0
        self._last_s = 0.0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.ended: object = None

    async def write(self, data: bytes) -> None:
        """Send the data, and return once the window has room again, as with flow control."""
        self._bytes += len(data) + 5
        self.send(data)
        while self._bytes > WINDOW_BYTES and self.ended is None:
            await self._wait()

    def send(self, item: Any) -> None:
        """Send an item. It arrives after all earlier ones."""
        loop = self._net.loop
        self._last_s = max(self._last_s + ORDER_S, loop.time() + self._net.delay_s(self._source, self._sink))
        loop.call_at(self._last_s, self._arrive, item, context=loop.world)

    async def read(self) -> Any:
        """Return the next item. Once nothing is left, return the end marker."""
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
        """Close the pipe after the items that have arrived."""
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
