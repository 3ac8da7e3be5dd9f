"""Exactly-once work over Kafka, either a cluster or the embedded broker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import structlog
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from google.protobuf.message import Message

from libs.bus.broker import committed_offsets, named_partitions, partitions
from libs.bus.clients import (
    CONNECTION_ERRORS,
    Brokers,
    open_admin,
    open_consumer,
    open_member,
    open_producer,
    read_span,
)
from libs.bus.codec import SCHEMA_HEADER, SkippedRecords, encode
from libs.bus.lanes import LANE_ERRORS, Lanes
from libs.bus.port import Record
from libs.bus.subscription import Subscription
from libs.bus.work import Handle
from libs.contracts.errors import BrokerUnavailable, TopicNotFound
from libs.contracts.topics import Topic
from libs.runtime.backoff import Backoff

log = structlog.get_logger()

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
RETRY_AFTER_S = 2.0
ASK_TIMEOUT_S = 6.0
"""The longest time for which a caller waits for the broker to accept a record or answer a query."""


class KafkaWork:
    """A WorkBus over the brokers at `bootstrap`. `member` is a unique name of this process."""

    def __init__(self, bootstrap: Brokers, cluster: str, member: str, skipped: SkippedRecords | None = None) -> None:
        """Create the bus; `skipped` counts the records that are skipped as foreign or malformed."""
        self._bootstrap = bootstrap
        self._cluster = cluster
        self._member = member
        self._skipped = skipped or SkippedRecords()

    async def send(self, topic: Topic, value: Message) -> None:
        """Publish and wait for the broker's confirmation. Calls should be rare, since each opens a connection."""
        record = encode(topic, self._cluster, value)
        headers = [(SCHEMA_HEADER, record.schema)]
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                open_producer(self._bootstrap, self._member) as producer,
            ):
                await producer.send_and_wait(record.topic, record.value, key=record.key, headers=headers)
        except CONNECTION_ERRORS as error:
            raise _unavailable(error) from error

    async def ends(self, topic: Topic) -> list[int]:
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                open_admin(self._bootstrap, self._member) as admin,
                open_consumer(self._bootstrap, self._member) as consumer,
            ):
                found = await consumer.end_offsets(await self._partitions(admin, topic))
        except CONNECTION_ERRORS as error:
            raise _unavailable(error) from error
        return [offset for _, offset in sorted(found.items())]

    async def trim(self, topic: Topic, before: Sequence[int]) -> None:
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                open_admin(self._bootstrap, self._member) as admin,
            ):
                parts = await self._partitions(admin, topic)
                wanted = {part: RecordsToDelete(offset) for part, offset in zip(parts, before, strict=False) if offset}
                if wanted:
                    await admin.delete_records(wanted)
        except CONNECTION_ERRORS as error:
            raise _unavailable(error) from error

    async def committed(self, topic: Topic, group: str) -> list[int]:
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                open_admin(self._bootstrap, self._member) as admin,
            ):
                parts = await self._partitions(admin, topic)
                found = await committed_offsets(admin, self._group(group), parts)
        except CONNECTION_ERRORS as error:
            raise _unavailable(error) from error
        return [max(found[part].offset, 0) for part in parts]

    def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        subscription = Subscription(
            self._bootstrap,
            [topic],
            self._cluster,
            self._member,
            from_start=True,
            skipped=self._skipped,
            since=since,
            on_replayed=on_replayed,
        )
        return subscription.records(lambda: False)

    async def values(self, name: str) -> AsyncIterator[bytes]:
        try:
            async with (
                open_admin(self._bootstrap, self._member) as admin,
                open_consumer(self._bootstrap, self._member) as consumer,
            ):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    numbers = await named_partitions(admin, name)
                    if not numbers:
                        raise TopicNotFound(f"the broker has no topic {name!r}", param="input_topic")
                    parts = [TopicPartition(name, number) for number in numbers]
                    starts, ends = await consumer.beginning_offsets(parts), await consumer.end_offsets(parts)
                for part in parts:
                    async for raw in read_span(consumer, part, starts[part], ends[part]):
                        if raw.value is not None:  # a deletion
                            yield raw.value
        except CONNECTION_ERRORS as error:
            raise _unavailable(error) from error

    async def check_topic(self, name: str, *, param: str) -> None:
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                open_admin(self._bootstrap, self._member) as admin,
            ):
                numbers = await named_partitions(admin, name)
        except CONNECTION_ERRORS as error:
            raise _unavailable(error) from error
        if not numbers:
            raise TopicNotFound(f"the broker has no topic {name!r} to write to", param=param)

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        now_s = asyncio.get_running_loop().time
        while True:
            started_s = now_s()
            try:
                await self._be_member(topic, self._group(group), handle)
            except LANE_ERRORS as error:
                if now_s() - started_s > BACKOFF_MAX_S:
                    backoff.reset()
                wait_s = backoff.next_s()
                if backoff.failures == 1:
                    log.warning("work is interrupted", topic=topic.stem, error=repr(error))
                await asyncio.sleep(wait_s)

    async def _be_member(self, topic: Topic, group: str, handle: Handle) -> None:
        """Take part in the group until a client becomes unusable, and raise one of LANE_ERRORS."""
        async with (
            open_admin(self._bootstrap, self._member) as admin,
            open_member(self._bootstrap, self._member, group) as consumer,
            open_consumer(self._bootstrap, self._member, uncommitted=True) as uncommitted,
        ):
            lanes = Lanes(
                bootstrap=self._bootstrap,
                topic=topic,
                cluster=self._cluster,
                group=group,
                client_id=self._member,
                admin=admin,
                consumer=consumer,
                uncommitted=uncommitted,
                handle=handle,
                skipped=self._skipped,
            )
            consumer.subscribe([topic.name(self._cluster)], listener=lanes)
            try:
                await lanes.failed()
            finally:
                await lanes.close()

    async def _partitions(self, admin: AIOKafkaAdminClient, topic: Topic) -> list[TopicPartition]:
        """Return the topic's partitions, or nothing if it does not exist."""
        name = topic.name(self._cluster)
        numbers = (await partitions(admin, [topic], self._cluster)).get(name, ())
        return [TopicPartition(name, number) for number in numbers]

    def _group(self, group: str) -> str:
        return f"fulcrum.{self._cluster}.{group}"


def _unavailable(error: BaseException) -> BrokerUnavailable:
    return BrokerUnavailable(f"the broker does not answer ({error!r})", retry_after_s=RETRY_AFTER_S)
