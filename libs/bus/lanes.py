"""The partitions assigned to this group member, each with transactions of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import ConsumerStoppedError, ProducerClosed
from aiokafka.structs import OffsetAndMetadata

from libs.bus.clients import CONNECTION_ERRORS, BrokerAway
from libs.bus.codec import SkippedRecords, to_record
from libs.bus.port import Record
from libs.bus.security import Brokers
from libs.bus.transactions import Transactions
from libs.bus.work import Handle, Produced
from libs.contracts.topics import Topic
from libs.runtime.tasks import end

log = structlog.get_logger()

LANE_ERRORS = (*CONNECTION_ERRORS, ConsumerStoppedError, ProducerClosed)
POLL_MS = 250
STALL_POLLS = 24
"""The number of consecutive empty polls after which a lane checks for records that fail to arrive."""
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
        """`end` is the end of the partition when the lane began."""
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
        empty_polls = 0
        while True:
            at_once = not self.replayed and not empty_polls
            found = await self._consumer.getmany(
                self._partition, timeout_ms=1 if at_once else POLL_MS, max_records=MAX_POLL_RECORDS
            )
            raws = found.get(self._partition, ())
            records = (to_record(self._topic, raw, self._skipped) for raw in raws)
            batch = [record for record in records if record is not None]
            empty_polls = 0 if batch else empty_polls + 1
            stalled = empty_polls % STALL_POLLS == STALL_POLLS - 1
            if not self.replayed or stalled:
                position = await self._consumer.position(self._partition)
                self.replayed = self.replayed or position >= self.end
                if stalled and position < (await self._consumer.end_offsets([self._partition]))[self._partition]:
                    raise BrokerAway(f"{self._partition} has records that do not come")
            yield batch

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        work = self._commit(produced, OffsetAndMetadata(next_offset, note))
        task = asyncio.get_running_loop().create_task(work, name="commit")
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # A transaction left open would hold up every reader until it times out.
            await asyncio.wait([task])
            raise

    async def _commit(self, produced: Sequence[Produced], offset: OffsetAndMetadata) -> None:
        # A failed transaction is not aborted here; opening the lane again makes the broker abort it.
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
        """`uncommitted` is a consumer without partitions, which reports their ends including open transactions."""
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
        """Let each revoked lane commit what it has, and end it, before the group reassigns partitions."""
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
            # The end includes open transactions: its predecessor's commits may follow a transaction that another
            # lane's predecessor has left open, and are readable once that has ended.
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
