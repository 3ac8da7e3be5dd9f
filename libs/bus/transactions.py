"""Transactions of one partition, which hold records and the progress of its work.

The transactional id belongs to the partition, not to the member. Opening it fences the former owner, even one that
has not noticed the loss, and committed progress is read only then. After a refusal the producer is opened again.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata

from libs.bus.broker import named_partitions
from libs.bus.clients import BrokerAway, open_transactions
from libs.bus.codec import SCHEMA_HEADER, encode
from libs.bus.offsets import NONE, committed_offsets
from libs.bus.security import Brokers
from libs.bus.work import Produced, Raw
from libs.contracts.errors import TooLargeForTopic, TopicRefused

TOPIC_ERRORS = (
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
"""Errors caused by a topic, or by what is written to it, rather than by the broker."""


class Transactions:
    """A sequence of transactions, possible for as long as nobody else opens the partition's transactional id."""

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
        """Fence other producers of the partition, and set `committed` to where work begins."""
        async with self._held:
            self.committed = await self._take()
            yield

    async def commit(self, produced: Sequence[Produced], offset: OffsetAndMetadata) -> None:
        """Commit everything or nothing.

        Raises TopicRefused if a client's topic does not accept its records, and TooLargeForTopic if one of them is
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
            # aiokafka raises this as well if no broker has answered. In that case the next call raises.
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
                if topic not in begun:  # the first record shows whether the topic may be written to
                    begun.add(topic)
                    await sent[-1]
            for raw, acknowledged in zip(raws, sent, strict=True):
                topic = raw.topic
                await acknowledged
        except TOPIC_ERRORS as error:
            await self._renew()
            raise _refused(topic, error) from error

    async def _renew(self) -> None:
        """End the transaction by opening a new producer. Raises BrokerAway if another member has worked here.

        aiokafka's own abort is not enough: it loses the sequence numbers of refused records, and a topic that may
        not be written to makes it forget what else the transaction holds.
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
            record = encode(item[0], self._cluster, item[1])
            headers = [(SCHEMA_HEADER, record.schema)]
            sending = self._producer.send(record.topic, record.value, key=record.key, headers=headers)
        sent: asyncio.Future[object] = await sending
        sent.add_done_callback(_look_at)  # sends after a failed one are never awaited
        return sent


def _refused(topic: str, error: BaseException) -> TopicRefused:
    too_large = isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError)
    kind = TooLargeForTopic if too_large else TopicRefused
    return kind(f"topic {topic} does not take answers ({getattr(error, 'message', error)})")


def _look_at(sent: "asyncio.Future[object]") -> None:
    if not sent.cancelled():
        sent.exception()
