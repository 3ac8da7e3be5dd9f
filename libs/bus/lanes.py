"""The partitions assigned to this group member, and the transactions of each with its records and progress."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    ConsumerStoppedError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    ProducerClosed,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata

from libs.bus.broker import NONE, committed_offsets, named_partitions
from libs.bus.clients import CONNECTION_ERRORS, BrokerAway, Brokers, open_transactions
from libs.bus.codec import SCHEMA_HEADER, SkippedRecords, encode, to_record
from libs.bus.port import Record
from libs.bus.work import Handle, Produced, Raw
from libs.contracts.errors import TooLargeForTopic, TopicRefused
from libs.contracts.topics import Topic
from libs.runtime.tasks import end, finish, retrieve

# The transactional id belongs to the partition, not to the member. Opening it fences the former owner, even one that
# has not noticed the loss, and committed progress is read only then. After a refusal the producer is opened again.


TOPIC_ERRORS = (
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
"""Errors caused by a topic, or by the records written to it, rather than by the broker."""


class Transactions:
    """A sequence of transactions, possible until another member opens the partition's transactional id."""

    def __init__(
        self,
        *,
        bootstrap: Brokers,
        client_id: str,
        cluster: str,
        group: str,
        partition: TopicPartition,
        admin: AIOKafkaAdminClient,
    ) -> None:
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._cluster = cluster
        self._group = group
        self._partition = partition
        self._admin = admin
        self._held = AsyncExitStack()
        self._producer: AIOKafkaProducer
        self._there: set[str] = set()
        """Clients' topics that this producer has found to exist."""
        self.committed: OffsetAndMetadata = NONE

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Fence other producers of the partition, and set `committed` to the offset at which work begins."""
        async with self._held:
            self.committed = await self._take()
            yield

    async def commit(self, produced: Sequence[Produced], offset: OffsetAndMetadata) -> None:
        """Commit everything or nothing.

        Raise TopicRefused if a client's topic does not accept its records, and TooLargeForTopic if one of them is
        too large.
        """
        raws = [item for item in produced if isinstance(item, Raw)]
        try:
            # Checked before anything is sent: aiokafka refuses to send after one topic's look-up has failed.
            for topic in dict.fromkeys(raw.topic for raw in raws):
                await self._need_topic(topic)
        except TOPIC_ERRORS as error:
            raise _refused(topic, error) from error
        await self._producer.begin_transaction()
        own = [await self._send(item) for item in produced if not isinstance(item, Raw)]
        await self._send_raw(raws)
        await self._producer.send_offsets_to_transaction({self._partition: offset}, self._group)
        for sent in own:
            await sent  # aiokafka would commit without a refused record and without an error
        await self._producer.commit_transaction()
        self.committed = offset

    async def _need_topic(self, name: str) -> None:
        """Raise one of TOPIC_ERRORS if the topic does not exist, and another KafkaError if no broker answers.

        The check precedes the producer's first use of the name, which could create the topic.
        """
        if name not in self._there:
            if not await named_partitions(self._admin, name):
                raise UnknownTopicOrPartitionError(name)
            self._there.add(name)
        try:
            await self._producer.partitions_for(name)
        except UnknownTopicOrPartitionError:
            # aiokafka also raises this if no broker has answered. In that case the next call raises.
            found = await self._producer.client.fetch_all_metadata()
            if found.partitions_for_topic(name) is None:
                raise

    async def _send_raw(self, raws: Sequence[Raw]) -> None:
        """Send all records, or end the transaction and raise TopicRefused."""
        begun: set[str] = set()
        sent: list[asyncio.Future[object]] = []
        topic = ""
        try:
            for raw in raws:
                topic = raw.topic
                sent.append(await self._send(raw))
                if topic not in begun:  # the first record shows whether the topic is writable
                    begun.add(topic)
                    await sent[-1]
            for raw, acknowledged in zip(raws, sent, strict=True):
                topic = raw.topic
                await acknowledged
        except TOPIC_ERRORS as error:
            await self._renew()
            raise _refused(topic, error) from error

    async def _renew(self) -> None:
        """End the transaction by opening a new producer. Raise BrokerAway if another member has worked here.

        aiokafka's own abort is not enough. It loses the sequence numbers of refused records, and forgets the
        transaction's other records if a topic is not writable.
        """
        await self._held.aclose()
        if await self._take() != self.committed:
            raise BrokerAway(f"{self._partition} has gone on without this member")

    async def _take(self) -> OffsetAndMetadata:
        """Open a producer, which ends open transactions of any other for the partition, and return the committed
        offset.
        """
        opening = open_transactions(self._bootstrap, self._client_id, f"{self._group}.{self._partition.partition}")
        self._there.clear()
        self._producer = await self._held.enter_async_context(opening)
        return (await committed_offsets(self._admin, self._group, [self._partition]))[self._partition]

    async def _send(self, item: Produced) -> "asyncio.Future[object]":
        """Send a record and return the future of the broker's confirmation."""
        if isinstance(item, Raw):
            sending = self._producer.send(item.topic, item.value, key=item.key)
        else:
            topic, value = item
            record = encode(topic, self._cluster, value)
            partition = None
            if topic.spread_by:
                partitions = sorted(await self._producer.partitions_for(record.topic))
                partition = partitions[topic.turn(value) % len(partitions)]
            headers = [(SCHEMA_HEADER, record.schema)]
            sending = self._producer.send(
                record.topic, record.value, key=record.key, partition=partition, headers=headers
            )
        sent: asyncio.Future[object] = await sending
        sent.add_done_callback(retrieve)  # sends after a failed one are never awaited
        return sent


def _refused(topic: str, error: BaseException) -> TopicRefused:
    too_large = isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError)
    kind = TooLargeForTopic if too_large else TopicRefused
    return kind(f"topic {topic} does not take answers ({getattr(error, 'message', error)})")


log = structlog.get_logger()

LANE_ERRORS = (*CONNECTION_ERRORS, ConsumerStoppedError, ProducerClosed)
POLL_MS = 250
STALL_POLLS = 12
"""The number of consecutive empty polls after which a lane requests the partition's end. If its position stays before
that end for as many polls more, the records never arrive.
"""
MAX_POLL_RECORDS = 100
COMMIT_TIMEOUT_S = 10.0


class KafkaLane:
    """A Lane over one partition and its transactions."""

    def __init__(
        self,
        *,
        topic: Topic,
        partition: TopicPartition,
        consumer: AIOKafkaConsumer,
        transactions: Transactions,
        end: int,
        skipped: SkippedRecords,
    ) -> None:
        """Create the lane. `end` is the end of the partition at that time."""
        self._topic = topic
        self._partition = partition
        self._consumer = consumer
        self._transactions = transactions
        self.end = end
        self._skipped = skipped
        self.note: str = transactions.committed.metadata
        self.replayed = False

    @property
    def partition(self) -> int:
        number: int = self._partition.partition
        return number

    async def batches(self) -> AsyncIterator[list[Record]]:
        empty_polls, stood_at, expected_end = 0, 0, 0
        while True:
            at_once = not self.replayed and not empty_polls
            found = await self._consumer.getmany(
                self._partition, timeout_ms=1 if at_once else POLL_MS, max_records=MAX_POLL_RECORDS
            )
            raws = found.get(self._partition, ())
            records = (to_record(self._topic, raw, self._skipped) for raw in raws)
            batch = [record for record in records if record is not None]
            empty_polls = 0 if raws else empty_polls + 1
            stalled = empty_polls % STALL_POLLS == STALL_POLLS - 1
            if not self.replayed or stalled:
                position = await self._consumer.position(self._partition)
                self.replayed = self.replayed or position >= self.end
                # The position also passes aborted transactions, in polls without records.
                if stalled and stood_at == position < expected_end:
                    raise BrokerAway(f"{self._partition} has records that do not arrive")
                if stalled:
                    stood_at = position
                    expected_end = (await self._consumer.end_offsets([self._partition]))[self._partition]
            yield batch

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        # An open transaction would delay every reader until it times out.
        await finish("commit", self._commit(produced, OffsetAndMetadata(next_offset, note)))

    async def _commit(self, produced: Sequence[Produced], offset: OffsetAndMetadata) -> None:
        # A failed transaction is not aborted here; reopening the lane makes the broker abort it.
        async with asyncio.timeout(COMMIT_TIMEOUT_S):
            await self._transactions.commit(produced, offset)


class Lanes(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """A rebalance listener that opens a lane for each partition assigned to this member, and closes revoked ones."""

    def __init__(
        self,
        *,
        bootstrap: Brokers,
        topic: Topic,
        cluster: str,
        group: str,
        client_id: str,
        admin: AIOKafkaAdminClient,
        consumer: AIOKafkaConsumer,
        uncommitted: AIOKafkaConsumer,
        handle: Handle,
        skipped: SkippedRecords,
    ) -> None:
        """Create the listener. `uncommitted` is a consumer without partitions, which reports their ends including open
        transactions.
        """
        self._bootstrap = bootstrap
        self._topic = topic
        self._cluster = cluster
        self._group = group
        self._client_id = client_id
        self._admin = admin
        self._consumer = consumer
        self._uncommitted = uncommitted
        self._handle = handle
        self._skipped = skipped
        self._tasks: dict[TopicPartition, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def failed(self) -> None:
        """Wait until a lane fails, and raise its error."""
        await asyncio.wait([self._failure])
        self._failure.result()

    async def close(self) -> None:
        await self.on_partitions_revoked(list(self._tasks))
        if not self._failure.done():
            self._failure.cancel()

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Let each revoked lane commit its work and end before the group reassigns partitions."""
        await end(*(task for partition in list(revoked) if (task := self._tasks.pop(partition, None))))

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        for partition in sorted(assigned):
            task = asyncio.get_running_loop().create_task(self._run(partition), name=f"lane {partition.partition}")
            task.add_done_callback(self._ended)
            self._tasks[partition] = task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _run(self, partition: TopicPartition) -> None:
        transactions = Transactions(
            bootstrap=self._bootstrap,
            client_id=self._client_id,
            cluster=self._cluster,
            group=self._group,
            partition=partition,
            admin=self._admin,
        )
        async with transactions.open():
            begins = transactions.committed.offset
            if begins < 0:
                begins = (await self._consumer.beginning_offsets([partition]))[partition]
            self._consumer.seek(partition, begins)
            # The end includes open transactions: the predecessor's commits may follow a transaction that another lane's
            # predecessor has left open, and are readable once that one has ended.
            lane = KafkaLane(
                topic=self._topic,
                partition=partition,
                consumer=self._consumer,
                transactions=transactions,
                end=(await self._uncommitted.end_offsets([partition]))[partition],
                skipped=self._skipped,
            )
            log.info("lane is open", topic=self._topic.stem, partition=partition.partition, offset=begins)
            await self._handle(lane)
