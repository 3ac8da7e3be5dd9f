"""A ZeroMQ subscription to publishers that start and stop."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

MAX_WAITING: Final = 1_000
"""The maximum number of messages of one publisher that wait to be read; beyond it the newest are dropped."""
MAX_FRAME_BYTES: Final = 64 * 1024
CONNECT_MS: Final = 2_000
FIRST_RETRY_MS, RETRY_MS = 100, 1_000
MESSAGES_A_TURN: Final = 100
"""The maximum number of messages read before other tasks have their turn."""
_AWAY: Final = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
_FOREIGN: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Subscriber:
    """One socket for all publishers. It reconnects to a publisher that ends, but not to one that breaks the
    protocol.
    """

    def __init__(self, topic: bytes) -> None:
        self.failures: Counter[str] = Counter()
        """Connections that ended or failed: `away`, or `foreign` if another program answers."""
        self._endpoints: set[str] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, FIRST_RETRY_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RETRY_MS)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._monitor = self._socket.get_monitor_socket(_AWAY | _FOREIGN)

    def follow(self, endpoints: Iterable[str]) -> None:
        """Subscribe to these publishers, and to no others."""
        wanted = set(endpoints)
        for endpoint in self._endpoints - wanted:
            self._disconnect(endpoint)
        for endpoint in sorted(wanted - self._endpoints):
            self._connect(endpoint)

    def renew(self, endpoint: str) -> None:
        """Reconnect to a publisher, regardless of the state of its connection."""
        self._disconnect(endpoint)
        self._connect(endpoint)

    def _connect(self, endpoint: str) -> None:
        try:
            self._socket.connect(endpoint)
            self._endpoints.add(endpoint)
        except zmq.ZMQError:
            self.failures["foreign"] += 1

    def _disconnect(self, endpoint: str) -> None:
        self._endpoints.discard(endpoint)
        with suppress(zmq.ZMQError):  # the connection has already ended
            self._socket.disconnect(endpoint)

    async def messages(self) -> AsyncIterator[list[bytes]]:
        """Yield all messages of the topic, each a list of frames."""
        while True:
            for _ in range(MESSAGES_A_TURN):
                yield await self._socket.recv_multipart()
            await asyncio.sleep(0)  # let other tasks run, because available messages are read without a pause

    async def watch(self) -> None:
        """Count failing connections until cancelled."""
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event & _AWAY:
                self.failures["away"] += 1
            elif event & _FOREIGN:
                self.failures["foreign"] += 1

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
