"""Contract tests of WorkBus over the embedded broker and Apache Kafka."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import NewTopic
from aiokafka.errors import KafkaError

from libs.bus.clients import open_admin, open_producer, open_transactions
from libs.bus.codec import SCHEMA_HEADER, encode
from libs.bus.kafka import KafkaBus
from libs.bus.kafka_work import KafkaWork
from libs.bus.work import Lane, Produced, Raw
from libs.contracts.errors import TooLargeForTopic, TopicNotFound, TopicRefused
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result, Share
from libs.contracts.topics import BATCH_RESULTS, BATCH_SHARES
from libs.testing.servers.stores import KafkaServer
from libs.testing.wait import until

SETTLE_S = 40.0


@pytest.fixture
async def topics(kafka: KafkaServer, cluster: str) -> AsyncIterator[None]:
    bus = KafkaBus(kafka.servers, cluster, "maker")
    await bus.start()
    yield
    await bus.close()


@asynccontextmanager
async def member(work: KafkaWork, handle: Callable[[Lane], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    task = asyncio.get_running_loop().create_task(work.work(BATCH_SHARES, "runners", handle))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def publish(kafka: KafkaServer, cluster: str, numbers: range) -> None:
    bus = KafkaBus(kafka.servers, cluster, "publisher")
    await bus.start()
    for number in numbers:
        bus.publish(BATCH_SHARES, Share(share_id=f"share-{number}", number=number))
    await bus.close()


def answer(number: int) -> tuple[Any, Result]:
    return BATCH_RESULTS, Result(job_id="job", place=number)


async def each_once(lane: Lane) -> None:
    """Commit one result for each share, in a transaction with its offset."""
    async for batch in lane.batches():
        for record in batch:
            assert isinstance(record.value, Share)
            await lane.commit([answer(record.value.number)], next_offset=record.offset + 1)


async def results(kafka: KafkaServer, cluster: str) -> Counter[int]:
    """Return all committed results, read by a client that knows nothing of the bus."""
    consumer = AIOKafkaConsumer(
        BATCH_RESULTS.name(cluster),
        bootstrap_servers=kafka.servers,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    await consumer.start()
    found: Counter[int] = Counter()
    try:
        while batches := await consumer.getmany(timeout_ms=1500):
            found.update(Result.FromString(raw.value).place for batch in batches.values() for raw in batch)
    finally:
        await consumer.stop()
    return found


@pytest.mark.usefixtures("topics")
async def test_every_share_has_one_result_whichever_member_works_on_it(kafka: KafkaServer, cluster: str) -> None:
    await publish(kafka, cluster, range(40))
    lanes: dict[str, set[int]] = {"a": set(), "b": set()}

    def handle(name: str) -> Callable[[Lane], Coroutine[Any, Any, None]]:
        async def work(lane: Lane) -> None:
            lanes[name].add(lane.partition)
            await each_once(lane)

        return work

    a = KafkaWork(kafka.servers, cluster, "a")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(member(a, handle("a")))
        await until(lambda: len(lanes["a"]) >= 4, timeout_s=SETTLE_S)
        await stack.enter_async_context(member(KafkaWork(kafka.servers, cluster, "b"), handle("b")))
        await until(lambda: lanes["b"], timeout_s=SETTLE_S, what="partitions for a second member")
        await publish(kafka, cluster, range(40, 80))
        async with asyncio.timeout(SETTLE_S):
            while (found := await results(kafka, cluster)).keys() != set(range(80)):
                pass
    assert set(found.values()) == {1}


@pytest.mark.usefixtures("topics")
async def test_a_lane_begins_at_its_last_commit_and_reads_the_note_of_that_commit(
    kafka: KafkaServer, cluster: str
) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    await work.send(BATCH_SHARES, Share(share_id="one", number=1))
    seen: list[tuple[str, int]] = []

    async def half(lane: Lane) -> None:
        async for batch in lane.batches():
            for record in batch:
                seen.append((lane.note, record.offset))
                if not lane.note:
                    await lane.commit([], next_offset=record.offset, note="half of it")

    async with member(work, half):
        await until(lambda: seen, timeout_s=SETTLE_S)
    async with member(work, half):
        await until(lambda: len(seen) == 2, timeout_s=SETTLE_S)
    assert seen[0][0] == ""
    assert seen[1] == ("half of it", seen[0][1])
    assert sum(await work.committed(BATCH_SHARES, "runners")) == seen[0][1]
    assert not any(await work.committed(BATCH_SHARES, "others"))


@pytest.mark.usefixtures("topics")
async def test_a_member_that_lost_its_lane_cannot_commit(kafka: KafkaServer, cluster: str) -> None:
    stale: dict[int, Lane] = {}
    refused: list[BaseException] = []
    again = asyncio.Event()

    async def hold(lane: Lane) -> None:
        """A member that does not notice the loss of its lane: it commits after another has opened it."""
        stale[lane.partition] = lane
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await again.wait()
            try:
                await lane.commit([answer(1)], next_offset=1)
            except (KafkaError, TimeoutError) as error:
                refused.append(error)
            raise

    async def take(_lane: Lane) -> None:
        again.set()
        await asyncio.Event().wait()

    async with member(KafkaWork(kafka.servers, cluster, "a"), hold):
        await until(lambda: len(stale) == BATCH_SHARES.partitions, timeout_s=SETTLE_S)
        # Another group member cannot be dealt a lane while its holder has not let go; a second group run under the
        # same name is what a gateway is that was frozen and replaced.
        async with member(KafkaWork(kafka.servers, cluster, "a"), take):
            await until(again.is_set, timeout_s=SETTLE_S)
            await until(lambda: refused, timeout_s=SETTLE_S)
    assert not await results(kafka, cluster)


@pytest.mark.usefixtures("topics")
async def test_neither_a_lookup_of_a_topic_nor_a_write_creates_it(kafka: KafkaServer, cluster: str) -> None:
    """Also on a broker that creates topics on demand, as the embedded one does."""
    work, missing = KafkaWork(kafka.servers, cluster, "a"), f"{cluster}-missing"
    refused: list[str] = []

    async def copies(lane: Lane) -> None:
        async for batch in lane.batches():
            for record in batch:
                with suppress(TopicRefused):
                    await lane.commit([answer(1), Raw(missing, b"", b"x")], next_offset=record.offset + 1)
                refused.append(missing)

    for param in ("input_topic", "output_topic"):
        with pytest.raises(TopicNotFound) as unknown:
            if param == "input_topic":
                async for _ in work.values(missing):
                    pass
            else:
                await work.check_topic(missing, param=param)
        assert unknown.value.param == param
    await work.send(BATCH_SHARES, Share(share_id="one", number=1))
    async with member(work, copies):
        await until(lambda: refused, timeout_s=SETTLE_S)
    async with open_admin(kafka.servers, "test") as admin:
        assert missing not in await admin.list_topics()
    assert not await results(kafka, cluster)


@pytest.mark.usefixtures("topics")
async def test_a_topic_that_refuses_records_breaks_neither_its_lane_nor_the_transaction(
    kafka: KafkaServer, cluster: str
) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    missing, small, good = (f"{cluster}-{name}" for name in ("missing", "small", "good"))
    async with open_admin(kafka.servers, "maker") as admin:
        await admin.create_topics([NewTopic(small, 1, 1, topic_configs={"max.message.bytes": "1000"})])
        await admin.create_topics([NewTopic(good, 1, 1)])
    await work.check_topic(good, param="output_topic")
    with pytest.raises(TopicNotFound) as unknown:
        await work.check_topic(missing, param="output_topic")
    assert unknown.value.param == "output_topic"
    await work.send(BATCH_SHARES, Share(share_id="one", number=1))
    reported: list[str] = []
    lanes = 0

    async def copies(lane: Lane) -> None:
        nonlocal lanes
        lanes += 1
        async for batch in lane.batches():
            for record in batch:
                for topic, size, takes in (
                    (missing, 10, False),
                    (small, 10, True),
                    (small, 5000, False),
                    (small, 20, True),
                    (good, 5000, True),
                ):
                    produced: list[Produced] = [answer(2 if takes else 1), Raw(topic, b"", b"x" * size)]
                    try:
                        await lane.commit(produced, next_offset=record.offset + 1, note=topic)
                        reported.append("")
                    except TopicRefused as error:
                        assert isinstance(error, TooLargeForTopic) == (topic == small)
                        reported.append(error.message)

    async with member(work, copies):
        await until(lambda: len(reported) == 5, timeout_s=SETTLE_S)
    assert [bool(message) for message in reported] == [True, False, True, False, False]
    assert (missing in reported[0], small in reported[2]) == (True, True)
    assert lanes == BATCH_SHARES.partitions, "none was opened again"
    assert await results(kafka, cluster) == Counter({2: 3})
    assert [len(value) async for value in work.values(small)] == [10, 20]


@pytest.mark.faults
@pytest.mark.usefixtures("topics")
async def test_a_killed_broker_neither_loses_nor_repeats_a_result(kafka: KafkaServer, cluster: str) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    await publish(kafka, cluster, range(60))
    begun = 0

    async def slowly(lane: Lane) -> None:
        nonlocal begun
        async for batch in lane.batches():
            for record in batch:
                assert isinstance(record.value, Share)
                begun += 1
                await asyncio.sleep(0.02)
                await lane.commit([answer(record.value.number)], next_offset=record.offset + 1)

    async with member(work, slowly):
        await until(lambda: begun > 10, timeout_s=SETTLE_S)
        kafka.server.kill()
        kafka.server.start()
        found: Counter[int] = Counter()
        async with asyncio.timeout(SETTLE_S):
            while found.keys() != set(range(60)):
                found = await results(kafka, cluster)
    assert set(found.values()) == {1}


@pytest.mark.faults
@pytest.mark.usefixtures("topics")
async def test_a_broker_outage_is_not_a_refusal(kafka: KafkaServer, cluster: str) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    good = f"{cluster}-good"
    await work.send(BATCH_SHARES, Share(share_id="one", number=1))
    failures: list[Exception] = []
    committed = asyncio.Event()

    async def first_while_away(lane: Lane) -> None:
        async for batch in lane.batches():
            for record in batch:
                away = not failures
                if away:
                    await lane.commit([answer(0)], next_offset=record.offset)  # the topic of results is known then
                    async with open_admin(kafka.servers, "maker") as admin:
                        await admin.create_topics([NewTopic(good, 1, 1)])  # the lane has no metadata of it
                    kafka.server.kill()
                try:
                    await lane.commit([answer(1), Raw(good, b"", b"x")], next_offset=record.offset + 1)
                    committed.set()
                except Exception as error:
                    failures.append(error)
                    raise
                finally:
                    if away:
                        kafka.server.start()

    async with member(work, first_while_away):
        await until(committed.is_set, timeout_s=SETTLE_S)
    assert await results(kafka, cluster) == Counter([0, 1])
    assert failures
    assert not any(isinstance(error, TopicRefused) for error in failures)


async def test_a_sent_record_is_on_the_broker_and_advances_the_end_offsets(
    kafka: KafkaServer, cluster: str, topics: None
) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    assert sum(await work.ends(BATCH_SHARES)) == 0
    since = await work.ends(BATCH_SHARES)
    await work.send(BATCH_SHARES, Share(share_id="one", number=1))
    assert sum(await work.ends(BATCH_SHARES)) == 1
    async for record in work.follow(BATCH_SHARES, since):
        assert record.value == Share(share_id="one", number=1)
        break


@pytest.mark.usefixtures("topics")
async def test_a_follower_is_notified_once_it_has_read_the_existing_records(kafka: KafkaServer, cluster: str) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    for number in range(3):
        await work.send(BATCH_SHARES, Share(share_id=f"share-{number}", number=number))
    read: list[int] = []
    reported: list[int] = []

    async def follow() -> None:
        async for record in work.follow(BATCH_SHARES, on_replayed=lambda: reported.append(len(read))):
            assert isinstance(record.value, Share)
            read.append(record.value.number)

    task = asyncio.get_running_loop().create_task(follow())
    try:
        await until(lambda: reported, timeout_s=SETTLE_S)
        await work.send(BATCH_SHARES, Share(share_id="late", number=3))
        await until(lambda: len(read) == 4, timeout_s=SETTLE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert reported == [3]


@pytest.mark.usefixtures("topics")
async def test_replay_completes_only_after_records_committed_behind_an_open_transaction(
    kafka: KafkaServer, cluster: str
) -> None:
    """Otherwise a lane would act without the last commit of its predecessor."""
    work = KafkaWork(kafka.servers, cluster, "a")
    name, record = BATCH_SHARES.name(cluster), encode(BATCH_SHARES, cluster, Share(share_id="behind", number=1))
    replayed: list[bool] = []
    read: list[int] = []

    async def look(lane: Lane) -> None:
        async for batch in lane.batches():
            read.extend(each.value.number for each in batch if isinstance(each.value, Share))
            if lane.partition == 0:
                replayed.append(lane.replayed)

    async with open_transactions(kafka.servers, "another", f"{cluster}.another") as another:
        await another.begin_transaction()
        await another.send_and_wait(name, b"open", partition=0)
        async with open_producer(kafka.servers, "predecessor") as predecessor:
            headers = [(SCHEMA_HEADER, record.schema)]
            await predecessor.send_and_wait(name, record.value, headers=headers, partition=0)
        async with member(work, look):
            await until(lambda: len(replayed) >= 3, timeout_s=SETTLE_S)
            assert not any(replayed)
            assert not read
            await another.abort_transaction()
            await until(lambda: replayed[-1], timeout_s=SETTLE_S)
    assert read == [1]


@pytest.mark.usefixtures("topics")
async def test_trimmed_records_are_gone_and_later_ones_stay(kafka: KafkaServer, cluster: str) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    for number in range(12):
        await work.send(BATCH_RESULTS, Result(job_id="job", place=number))
    before = await work.ends(BATCH_RESULTS)
    await work.send(BATCH_RESULTS, Result(job_id="job", place=99))
    assert len(await results(kafka, cluster)) == 13
    await work.trim(BATCH_RESULTS, before)
    assert await results(kafka, cluster) == Counter({99: 1})
    assert sum(await work.ends(BATCH_RESULTS)) == 13


@pytest.mark.usefixtures("topics")
async def test_the_shares_of_each_job_are_spread_over_the_partitions_in_turn(kafka: KafkaServer, cluster: str) -> None:
    work = KafkaWork(kafka.servers, cluster, "a")
    jobs = ("one", "two")
    await work.send(BATCH_SHARES, Share(share_id="first"))

    async def deals(lane: Lane) -> None:
        async for batch in lane.batches():
            for record in batch:
                if record.key == "first":
                    shares = [
                        Share(share_id=f"{job}/{turn}", job_id=job, number=turn) for job in jobs for turn in range(16)
                    ]
                    await lane.commit([(BATCH_SHARES, share) for share in shares], next_offset=record.offset + 1)

    found: Counter[tuple[str, int]] = Counter()
    async with member(work, deals), asyncio.timeout(SETTLE_S):
        async for record in work.follow(BATCH_SHARES):
            assert isinstance(record.value, Share)
            found[record.value.job_id, record.partition] += 1
            if found.total() == 33:
                break
    del found["", next(partition for job, partition in found if not job)]
    assert found == {(job, partition): 2 for job in jobs for partition in range(BATCH_SHARES.partitions)}
