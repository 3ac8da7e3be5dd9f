"""The bus over Kafka, either a cluster or the embedded broker (libs/bus/embedded.py).

Delivery is at least once. A batch whose confirmation was lost with the broker is sent again, so readers detect
repeats by the numbering inside messages.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import structlog
from google.protobuf.message import Message

from libs.bus.buffer import MAX_BUFFERED_RECORDS, Buffer
from libs.bus.clients import at_once, quiet_client_log
from libs.bus.codec import SkippedRecords, encode
from libs.bus.port import BusStats, Record, Wanted
from libs.bus.security import Brokers
from libs.bus.sender import Sender
from libs.bus.subscription import Subscription
from libs.contracts.topics import ALL, Topic
from libs.runtime.tasks import OnFailure, TaskOwner

log = structlog.get_logger()

START_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits for the broker to accept buffered records."""


class KafkaBus:
    """A Bus over the broker or brokers at `bootstrap`: HOST:PORT[,HOST:PORT...]."""

    def __init__(
        self,
        bootstrap: Brokers,
        cluster: str,
        client_id: str,
        *,
        topics: Sequence[Topic] = ALL,
        on_failure: OnFailure | None = None,
        buffer_records: int = MAX_BUFFERED_RECORDS,
        gather_ms: Callable[[], int] = at_once,
    ) -> None:
        """`buffer_records` may wait for a broker that is away before the oldest are dropped.

        `gather_ms` is how much later subscriptions may be for fewer and larger responses, evaluated repeatedly. With
        0, each record wakes its readers.
        """
        self._bootstrap = bootstrap
        self._cluster = cluster
        self._client_id = client_id
        self._sender = Sender(bootstrap, cluster, client_id, topics, Buffer(max_records=buffer_records))
        self._gather_ms = gather_ms
        self.skipped = SkippedRecords()
        self._tasks = TaskOwner(on_failure)
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        quiet_client_log()
        self._sending = self._tasks.spawn("bus sender", self._sender.run())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._sender.tried.wait()
        except TimeoutError:
            log.warning("broker does not answer", timeout_s=START_TIMEOUT_S)

    def publish(self, topic: Topic, value: Message) -> None:
        self._sender.put(encode(topic, self._cluster, value))

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """Subscribe as `Bus.subscribe` does. The end of a partition is where it ends once reading has connected."""
        subscription = Subscription(
            self._bootstrap,
            topics,
            self._cluster,
            self._client_id,
            from_start=from_start,
            since_unix_ns=since_unix_ns,
            wanted=wanted,
            skipped=self.skipped,
            gather_ms=self._gather_ms,
        )
        return subscription.records(lambda: self._closed)

    def stats(self) -> BusStats:
        return BusStats(
            published=self._sender.published,
            dropped=self._sender.dropped,
            buffered=self._sender.buffered,
            skipped=self.skipped.counts,
        )

    async def close(self) -> None:
        """Send buffered records for a bounded time, disconnect, and end subscriptions. Idempotent."""
        self._closed = True
        self._sender.finish()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=CLOSE_TIMEOUT_S)
        await self._tasks.close()
        if self._sender.buffered:
            log.warning("records were not sent", records=self._sender.buffered)
