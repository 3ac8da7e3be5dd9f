"""Contract tests of the bus over the embedded broker, Apache Kafka and the broker in memory that simulations use."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from libs.bus.broker import topic_settings, weak_topics
from libs.bus.clients import open_admin
from libs.bus.codec import MAX_BUFFERED_RECORDS, SCHEMA_HEADER
from libs.bus.port import Bus, Record, Wanted
from libs.bus.subscription import MAX_POLL_RECORDS
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent, StepBatch
from libs.contracts.topics import ALL, BATCH_RESULTS, DECISIONS, REQUESTS, STEPS, Topic
from libs.testing.contract.brokers import Broker, KafkaUnderTest
from libs.testing.servers.stores import KafkaServer
from libs.testing.wait import until

OUTAGE_S = 40.0
"""Bound on noticing an outage and a restart, and on sending what was held back meanwhile."""


@asynccontextmanager
async def connected(broker: Broker, cluster: str, client_id: str = "test") -> AsyncIterator[Bus]:
    bus = broker.bus(cluster, client_id)
    await bus.start()
    try:
        yield bus
    finally:
        await bus.close()


@pytest.fixture
async def bus(broker: Broker, cluster: str) -> AsyncIterator[Bus]:
    async with connected(broker, cluster) as bus:
        yield bus


@asynccontextmanager
async def reading(
    bus: Bus,
    topics: Sequence[Topic],
    *,
    from_start: bool = True,
    since_unix_ns: int | None = None,
    wanted: Wanted | None = None,
) -> AsyncIterator[list[Record]]:
    """The records that a subscription yields, as they arrive."""
    records: list[Record] = []

    async def read() -> None:
        subscription = bus.subscribe(topics, from_start=from_start, since_unix_ns=since_unix_ns, wanted=wanted)
        async for record in subscription:
            records.append(record)  # noqa: PERF401  (it never ends)

    task = asyncio.get_running_loop().create_task(read())
    try:
        yield records
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), "the subscription ended by itself"


def steps(records: Sequence[Record], worker_id: str = "w") -> list[int]:
    """Return the sequence numbers of a worker's batches, in the order read."""
    return [r.value.sequence for r in records if isinstance(r.value, StepBatch) and r.value.worker_id == worker_id]


def publish_steps(bus: Bus, numbers: range, worker_id: str = "w") -> None:
    for number in numbers:
        bus.publish(STEPS, StepBatch(worker_id=worker_id, sequence=number))


async def test_a_backlog_of_one_partition_holds_up_no_other(bus: Bus) -> None:
    backlog, others = 6 * MAX_POLL_RECORDS, "abcdefgh"
    publish_steps(bus, range(backlog))
    for worker_id in others:
        publish_steps(bus, range(1), worker_id)
    await until(lambda: bus.stats().buffered == 0)
    async with reading(bus, [STEPS]) as records:
        await until(lambda: len(records) == backlog + len(others))
    behind = next(record.partition for record in records if record.key == "w")
    elsewhere = [place for place, record in enumerate(records) if record.partition != behind]
    assert elsewhere
    assert max(elsewhere) < 2 * MAX_POLL_RECORDS
    assert steps(records) == list(range(backlog))


async def test_records_of_all_topics_arrive_whole_under_their_key(bus: Bus) -> None:
    sent = {
        STEPS: StepBatch(worker_id="prefill-0", sequence=3),
        REQUESTS: RequestEvent(request_id="é-\u4e16", prompt_tokens=5),
        DECISIONS: Decision(planner_id="planner", reason="\x00 binary"),
    }
    async with reading(bus, ALL) as records:
        for topic, value in sent.items():
            bus.publish(topic, value)
        await until(lambda: len(records) == len(sent))
    assert {record.topic: record.value for record in records} == sent
    assert {record.key for record in records} == {"prefill-0", "é-\u4e16", "planner"}


async def test_order_holds_for_each_key(bus: Bus) -> None:
    workers = [f"worker-{number}" for number in range(5)]
    async with reading(bus, [STEPS]) as records:
        for number in range(300):
            for worker in workers:
                bus.publish(STEPS, StepBatch(worker_id=worker, sequence=number))
        await until(lambda: len(records) == 300 * len(workers))
    assert all(steps(records, worker) == list(range(300)) for worker in workers)
    assert bus.stats().published == 300 * len(workers)
    assert (bus.stats().buffered, bus.stats().dropped) == (0, 0)


async def test_a_subscription_can_begin_at_a_time(bus: Bus) -> None:
    publish_steps(bus, range(5))
    await until(lambda: bus.stats().buffered == 0)
    sent_ns = time.time_ns()
    await until(lambda: time.time_ns() - sent_ns > 5_000_000)  # the broker tells milliseconds apart
    since_unix_ns = time.time_ns()
    publish_steps(bus, range(5, 10))
    await until(lambda: bus.stats().buffered == 0)
    async with reading(bus, [STEPS], from_start=False, since_unix_ns=since_unix_ns) as records:
        await until(lambda: steps(records)[-1:] == [9])
        publish_steps(bus, range(10, 12))
        await until(lambda: steps(records)[-1:] == [11])
    assert steps(records) == list(range(5, 12))


async def test_a_partition_wanted_later_is_read_from_shortly_before_that_moment(bus: Bus) -> None:
    workers = [f"w-{number}" for number in range(40)]
    taken = {0}
    async with reading(bus, [STEPS], from_start=False, wanted=lambda _topic, number: number in taken) as records:

        def reported(number: int) -> set[str]:
            return {record.key for record in records if record.value.sequence == number}

        def publish(number: int) -> None:
            for worker in workers:
                publish_steps(bus, range(number, number + 1), worker)

        async with asyncio.timeout(20):
            while not reported(0):
                publish(0)
                await asyncio.sleep(0.05)
        publish(1)
        await until(lambda: reported(1) and bus.stats().buffered == 0)
        assert {record.partition for record in records} == {0}
        taken |= {1, 2, 3}
        await until(lambda: reported(1) == set(workers))


async def test_a_subscription_after_the_last_record_begins_at_the_end(bus: Bus) -> None:
    publish_steps(bus, range(3))
    await until(lambda: bus.stats().buffered == 0)
    async with reading(bus, [STEPS], from_start=False, since_unix_ns=time.time_ns() + 10**10) as records:
        number = 3
        async with asyncio.timeout(10):
            while not records:
                publish_steps(bus, range(number, number + 1))
                number += 1
                await asyncio.sleep(0.05)
    assert min(steps(records)) >= 3


async def test_a_subscription_begins_at_the_end_unless_from_start(bus: Bus) -> None:
    publish_steps(bus, range(10))
    await until(lambda: bus.stats().buffered == 0)
    async with reading(bus, [STEPS], from_start=False) as late, reading(bus, [STEPS]) as all_of_it:
        # It cannot be seen from outside when `late` has found its end, so publish until it reads.
        number = 10
        async with asyncio.timeout(10):
            while not late:
                publish_steps(bus, range(number, number + 1))
                number += 1
                await asyncio.sleep(0.05)
        await until(lambda: len(all_of_it) == number)
    assert steps(all_of_it) == list(range(number))
    assert min(steps(late)) >= 10


async def test_every_subscriber_reads_every_record(broker: Broker, cluster: str, bus: Bus) -> None:
    async with (
        connected(broker, cluster, "other") as other,
        reading(bus, [STEPS]) as one,
        reading(other, [STEPS]) as two,
    ):
        publish_steps(other, range(50))
        await until(lambda: steps(one) == steps(two) == list(range(50)))


async def test_big_values_pass_and_one_beyond_the_bound_does_not_block_others(bus: Bus) -> None:
    big, too_big = b"x" * 900_000, b"x" * 1_100_000
    async with reading(bus, [BATCH_RESULTS]) as records:
        for answer in (b"first", big, too_big, b"last"):
            bus.publish(BATCH_RESULTS, Result(job_id="p", answer=answer))
        await until(lambda: len(records) == 3)
    assert [record.value.answer for record in records if isinstance(record.value, Result)] == [b"first", big, b"last"]
    assert bus.stats().dropped == 1


async def test_records_of_another_message_type_are_skipped_and_counted(broker: Broker, cluster: str, bus: Bus) -> None:
    schema = (SCHEMA_HEADER, StepBatch.DESCRIPTOR.full_name.encode())
    strange = [(b"\xff" * 9, [schema]), (b"", []), (b"", [(SCHEMA_HEADER, b"other")]), (None, [schema])]
    async with reading(bus, [STEPS]) as records:
        await broker.put(STEPS.name(cluster), strange)
        publish_steps(bus, range(1))
        await until(lambda: steps(records) == [0] and bus.stats().skipped == {("steps.v2", "unreadable"): 4})
    assert len(records) == 1


async def test_only_the_topics_message_can_be_published(bus: Bus) -> None:
    with pytest.raises(TypeError, match=r"StepBatch"):
        bus.publish(STEPS, Decision())


async def test_topics_are_created_at_start_with_their_partitions(broker: Broker, cluster: str, bus: Bus) -> None:
    wanted = {topic.name(cluster): topic.partitions for topic in ALL}
    assert await broker.partitions(list(wanted)) == wanted


@pytest.mark.kafka
async def test_the_broker_accepts_settings_of_replicated_topics_and_weak_topics_are_detected(
    real_kafka_server: KafkaServer, cluster: str
) -> None:
    """The test uses one broker, whose topics have one copy, with the settings of three."""
    async with open_admin(real_kafka_server.servers, "test") as admin:
        made = [
            NewTopic(f"{cluster}.{copies}", 1, 1, topic_configs=topic_settings(STEPS, copies)) for copies in (1, 2, 3)
        ]
        assert [code for _, code, *_ in (await admin.create_topics(made)).topic_errors] == [0, 0, 0]
        requested = [
            ConfigResource(ConfigResourceType.TOPIC, topic.name, {"min.insync.replicas": ""}) for topic in made
        ]
        found: dict[str, str] = {}
        async with asyncio.timeout(10):
            while len(found) < len(made):  # a busy broker describes topics only a moment after their creation
                (answer,) = await admin.describe_configs(requested)
                found = {name: settings[0][1] for _, _, _, name, settings in answer.resources if settings}
        assert found == {f"{cluster}.1": "1", f"{cluster}.2": "1", f"{cluster}.3": "2"}
        assert weak_topics(answer.resources) == [f"{cluster}.1", f"{cluster}.2"]
        await admin.delete_topics([topic.name for topic in made])


async def test_partitions_added_later_are_read_from_their_start(broker: Broker, cluster: str, bus: Bus) -> None:
    name = DECISIONS.name(cluster)
    async with reading(bus, [DECISIONS]) as records:
        bus.publish(DECISIONS, Decision(planner_id="p", reason="before"))
        await until(lambda: len(records) == 1)
        await broker.grow(name, 2)
        value = Decision(planner_id="p", reason="in the new one").SerializeToString()
        await broker.put(name, [(value, [(SCHEMA_HEADER, Decision.DESCRIPTOR.full_name.encode())])], partition=1)
        await until(lambda: [record.partition for record in records] == [0, 1])


async def test_a_topic_created_later_is_read_from_its_start(broker: Broker, cluster: str) -> None:
    reader = broker.bus(cluster, "early", topics=[REQUESTS])
    await reader.start()
    async with reading(reader, [REQUESTS, STEPS], from_start=False) as records:
        async with asyncio.timeout(10):
            while not records:  # until it reads, and so has seen that there is no other topic
                reader.publish(REQUESTS, RequestEvent(request_id="r"))
                await asyncio.sleep(0.02)
        async with connected(broker, cluster, "late") as writer:
            publish_steps(writer, range(20))
            await until(lambda: steps(records) == list(range(20)))
    await reader.close()


async def test_a_killed_broker_stops_neither_publisher_nor_subscriber(broker: Broker, bus: Bus) -> None:
    async with reading(bus, [STEPS]) as records:
        publish_steps(bus, range(20))
        await until(lambda: steps(records) == list(range(20)))
        broker.server.kill()
        try:
            publish_steps(bus, range(20, 40))
            await asyncio.sleep(0)
        finally:
            broker.server.start()
        publish_steps(bus, range(40, 60))
        await until(lambda: set(steps(records)) == set(range(60)), timeout_s=OUTAGE_S, what="all records")
    unique = list(dict.fromkeys(steps(records)))
    assert unique == list(range(60)), "each record's first reading is in order; repeats are allowed"
    assert (bus.stats().buffered, bus.stats().dropped) == (0, 0)


async def test_publisher_and_subscriber_survive_a_frozen_broker(broker: Broker, bus: Bus) -> None:
    async with reading(bus, [STEPS]) as records:
        publish_steps(bus, range(5))
        await until(lambda: steps(records) == list(range(5)))
        broker.server.freeze()
        try:
            publish_steps(bus, range(5, 10))
            await until(lambda: bus.stats().buffered == 5)
        finally:
            broker.server.thaw()
        await until(lambda: set(steps(records)) == set(range(10)), timeout_s=OUTAGE_S)


async def test_start_and_close_are_quick_and_publishing_is_bounded_while_the_broker_is_away(
    broker: Broker, cluster: str
) -> None:
    loop = asyncio.get_running_loop()
    bus = broker.bus_to_nobody(cluster)
    started_s = loop.time()
    await bus.start()
    publish_steps(bus, range(MAX_BUFFERED_RECORDS + 10))
    stats = bus.stats()
    assert (stats.published, stats.buffered, stats.dropped) == (MAX_BUFFERED_RECORDS + 10, MAX_BUFFERED_RECORDS, 10)
    await bus.close()
    await bus.close()
    assert loop.time() - started_s < 6


async def test_a_bus_that_starts_before_its_broker_delivers_once_the_broker_is_up(broker: Broker, cluster: str) -> None:
    broker.server.kill()
    try:
        bus = broker.bus(cluster, "early")
        await bus.start()
        async with reading(bus, [STEPS]) as records:
            publish_steps(bus, range(5))
            await asyncio.sleep(0)
            broker.server.start()
            await until(lambda: steps(records) == list(range(5)), timeout_s=OUTAGE_S)
        await bus.close()
    finally:
        if not broker.server.runs:
            broker.server.start()


async def test_closing_flushes_the_buffer_and_ends_subscriptions(broker: Broker, cluster: str) -> None:
    writer = broker.bus(cluster, "writer")
    await writer.start()
    ended = asyncio.get_running_loop().create_task(_drain(writer))
    publish_steps(writer, range(2_500))
    await writer.close()
    assert writer.stats().buffered == 0
    await asyncio.wait_for(ended, 5)
    async with connected(broker, cluster, "reader") as reader, reading(reader, [STEPS]) as records:
        await until(lambda: steps(records) == list(range(2_500)))


async def _drain(bus: Bus) -> None:
    async for _ in bus.subscribe([STEPS]):
        pass


async def test_a_subscription_cancelled_at_any_moment_leaves_no_task_behind(bus: Bus) -> None:
    publish_steps(bus, range(3))
    await until(lambda: bus.stats().buffered == 0)
    before = asyncio.all_tasks()
    for turns in (0, 1, 5, 20, 80):
        task = asyncio.get_running_loop().create_task(_drain(bus))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not asyncio.all_tasks() - before)


async def test_aborted_records_are_not_read(kafka: KafkaServer, cluster: str) -> None:
    """Only over Kafka, since nothing in memory has transactions."""
    async with connected(KafkaUnderTest(kafka), cluster) as bus:
        producer = AIOKafkaProducer(bootstrap_servers=kafka.servers, transactional_id=f"{cluster}-tx")
        await producer.start()
        headers = [(SCHEMA_HEADER, StepBatch.DESCRIPTOR.full_name.encode())]
        await producer.begin_transaction()
        aborted = StepBatch(worker_id="w", sequence=0).SerializeToString()
        await producer.send_and_wait(STEPS.name(cluster), aborted, key=b"w", headers=headers)
        await producer.abort_transaction()
        await producer.stop()
        publish_steps(bus, range(1, 2))
        async with reading(bus, [STEPS]) as records:
            await until(lambda: 1 in steps(records))
            assert steps(records) == [1]


async def test_many_large_records_are_stored_until_they_are_read(bus: Bus) -> None:
    size_bytes, count = 500_000, 30
    for number in range(count):
        bus.publish(BATCH_RESULTS, Result(job_id="p", place=number, answer=b"x" * size_bytes))
    await until(lambda: bus.stats().buffered == 0)
    async with reading(bus, [BATCH_RESULTS]) as records:
        read = lambda: [record.value.place for record in records if isinstance(record.value, Result)]  # noqa: E731
        await until(lambda: count - 1 in read())
        assert read() == list(range(count))
