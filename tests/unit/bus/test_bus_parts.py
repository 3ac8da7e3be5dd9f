"""Tests of the bus's pure parts: buffer, record format, progress and addresses."""

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndTimestamp
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.broker import Copies, few_copies, named_brokers, topic_settings, weak_topics
from libs.bus.codec import UNREADABLE, Buffer, Outgoing, SkippedRecords, decode, encode
from libs.bus.subscription import Progress, Subscription, Turns
from libs.contracts.errors import MAX_RETRY_WAIT_S, QueueFull, RateLimited
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import ALL, DECISIONS, STEPS, Topic
from libs.runtime.backoff import Backoff


def record(number: int, size: int = 1) -> Outgoing:
    return Outgoing("topic", b"key", bytes([number % 256]) * size, b"schema")


@pytest.mark.parametrize("topic", ALL, ids=lambda topic: topic.stem)
@given(copies=st.integers(1, 9))
def test_min_insync_replicas_is_two_from_three_copies_on_and_otherwise_one(topic: Topic, copies: int) -> None:
    """Two of two would stop all writing whenever one broker restarts."""
    settings = topic_settings(topic, copies)
    assert settings.get("min.insync.replicas") == ("2" if copies >= 3 else None)
    assert settings["retention.ms"] == str(topic.retention_ms)


@pytest.mark.parametrize(
    ("requested", "brokers", "servers", "copies"),
    [
        (0, 1, "a:1", 1),
        (0, 2, "a:1", 2),
        (0, 5, "a:1", 3),
        (0, 1, "a:1,b:1,c:1", 3),  # the other two are still starting
        (0, 1, "a:1, a:1,", 1),
        (1, 3, "a:1,b:1,c:1", 1),
        (5, 3, "a:1", 5),
    ],
)
def test_a_topic_has_three_copies_if_at_least_three_brokers_are_named(
    requested: int, brokers: int, servers: str, copies: int
) -> None:
    assert Copies(requested).wanted(brokers, named_brokers(servers)) == copies


@given(copies=st.integers(1, 9), requested=st.integers(0, 9))
def test_min_insync_replicas_never_exceeds_the_number_of_copies(copies: int, requested: int) -> None:
    needed = Copies(in_sync=requested).needed(copies)
    assert needed <= copies
    assert not requested or needed == min(requested, copies)
    assert topic_settings(STEPS, copies, Copies(in_sync=requested)).get("min.insync.replicas") == (
        str(needed) if needed else None
    )


def test_a_topic_is_reported_if_any_of_its_partitions_has_too_few_copies() -> None:
    one, three = {"replicas": [1]}, {"replicas": [1, 2, 3]}
    described = [{"topic": "some", "partitions": [three, one]}, {"topic": "all", "partitions": [three, three]}]
    assert few_copies(described, 3) == ["some"]
    assert few_copies(described, 1) == []


def test_a_topic_without_a_description_is_not_reported_as_weak() -> None:
    one, two = ("min.insync.replicas", "1", False), ("min.insync.replicas", "2", False)
    reported = [(0, "", 2, "strong", [two]), (0, "", 2, "weak", [one]), (29, "refused", 2, "secret", [])]
    assert weak_topics(reported) == ["weak"]


@given(
    st.lists(st.one_of(st.tuples(st.just("put"), st.integers(1, 40)), st.tuples(st.just("take"), st.integers(1, 9))))
)
def test_the_buffer_stays_within_its_bounds_and_accounts_for_every_record_in_order(
    actions: list[tuple[str, int]],
) -> None:
    buffer = Buffer(max_records=5, max_bytes=60)
    put: list[Outgoing] = []
    taken: list[Outgoing] = []
    dropped = 0
    for action, size in actions:
        if action == "put":
            put.append(record(len(put), size))
            dropped += buffer.append(put[-1])
        else:
            taken += buffer.take(size)
    taken += buffer.take(100)
    assert len(buffer) == 0
    assert len(taken) + dropped == len(put)
    remaining = iter(put)
    assert all(any(one is other for other in remaining) for one in taken), "taken in the order put"


def test_records_put_back_come_first_and_are_dropped_first() -> None:
    buffer = Buffer(max_records=3)
    records = [record(number) for number in range(4)]
    for one in records[:3]:
        buffer.append(one)
    batch = buffer.take(2)
    assert buffer.append(records[3]) == 0
    assert buffer.put_back(batch) == 1
    assert buffer.take(9) == records[1:]


def test_a_record_beyond_the_byte_bound_is_itself_dropped() -> None:
    buffer = Buffer(max_bytes=10)
    assert buffer.append(record(1, 11)) == 1
    assert buffer.append(record(2, 10)) == 0
    assert len(buffer) == 1


def test_a_record_names_its_message_type_and_is_decoded_only_as_that() -> None:
    value = StepBatch(worker_id="w", sequence=3)
    sent = encode(STEPS, "local", value)
    assert (sent.topic, sent.key) == ("fulcrum.local.steps.v2", b"w")
    headers = (("other", b"x"), ("schema", sent.schema))
    assert decode(STEPS, sent.value, headers) == value
    assert decode(DECISIONS, sent.value, headers) == UNREADABLE
    assert decode(STEPS, sent.value, ()) == UNREADABLE
    assert decode(STEPS, b"\xff", headers) == UNREADABLE
    assert decode(STEPS, None, headers) == UNREADABLE
    with pytest.raises(TypeError, match="StepBatch"):
        encode(STEPS, "local", Decision())


def test_a_partition_is_stalled_only_if_it_lags_at_one_position_for_the_bound() -> None:
    progress: Progress[str] = Progress(stall_s=3)
    assert progress.stalled(0, {"a": 5, "b": 0}, {"a": 5, "b": 9}) == []
    assert progress.stalled(4, {"a": 5, "b": 1}, {"a": 5, "b": 9}) == [], "at its end, and moving"
    assert progress.stalled(6, {"a": 5, "b": 1}, {"a": 6, "b": 9}) == []
    assert progress.stalled(7.5, {"a": 5, "b": 1}, {"a": 6, "b": 9}) == ["a", "b"]
    assert progress.stalled(8, {"a": 6, "b": 9}, {"a": 6, "b": 9}) == []


def test_a_partition_whose_records_wait_for_those_of_another_is_not_stalled() -> None:
    progress: Progress[str] = Progress(stall_s=3)
    assert progress.stalled(0, {"a": 0, "b": 0}, {"a": 9, "b": 9}) == []
    assert progress.stalled(5, {"a": 1, "b": 0}, {"a": 9, "b": 9}, full=True) == []
    assert progress.stalled(7, {"a": 2, "b": 0}, {"a": 9, "b": 9}) == []
    assert progress.stalled(9, {"a": 3, "b": 0}, {"a": 9, "b": 9}) == ["b"]


class Fetched:
    """A consumer that has fetched records, which it returns partition after partition as aiokafka does."""

    def __init__(self, **counts: int) -> None:
        self.left = {TopicPartition(name, 0): count for name, count in counts.items()}
        self.now_s = 0.0

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int, max_records: int
    ) -> dict[TopicPartition, list[int]]:
        found: dict[TopicPartition, list[int]] = {}
        for partition in partitions or self.left:
            taken = min(self.left[partition], max_records)
            if taken:
                self.left[partition] -= taken
                max_records -= taken
                found[partition] = [0] * taken
        if not found:
            self.now_s += timeout_ms / 1000
        return found


async def test_a_partition_waits_for_one_poll_of_each_other_at_most() -> None:
    consumer: Any = Fetched(a=2000, b=1200, c=10)
    turns = Turns(consumer, lambda: consumer.now_s)
    polled = [{each.topic: len(found) for each, found in (await turns.poll(consumer.left)).items()} for _ in range(9)]
    assert polled == [{"a": 500}, {"b": 500}, {"c": 10}, {"a": 500}, {"b": 500}, {"a": 500}, {"b": 200}, {"a": 500}, {}]


async def test_the_time_of_a_slow_reader_is_no_sign_of_a_lost_broker() -> None:
    consumer: Any = Fetched(a=1)
    turns, partition = Turns(consumer, lambda: consumer.now_s), TopicPartition("b", 0)
    assert turns.stalled({partition: 5}, {partition: 5}) == []
    await turns.poll(consumer.left)
    consumer.now_s += 60
    assert turns.stalled({partition: 5}, {partition: 9}) == [], "written while the reader was busy"
    for _ in range(8):
        await turns.poll(consumer.left)
    assert turns.stalled({partition: 5}, {partition: 9}) == [partition]


class Broker:
    """A consumer's view: each partition holds [0, 900), the last ten seconds' records from 800 on."""

    def __init__(self) -> None:
        self.away = False
        self.sought: dict[int, int] = {}

    async def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._reported(partitions, 0)

    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._reported(partitions, 900)

    async def offsets_for_times(
        self, times: dict[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        reported = await self._reported(list(times), 800)
        return {partition: OffsetAndTimestamp(offset, 0) for partition, offset in reported.items()}

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self.sought = {}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.sought[partition.partition] = offset

    async def _reported(self, partitions: Sequence[TopicPartition], offset: int) -> dict[TopicPartition, int]:
        if self.away:
            raise TimeoutError
        return dict.fromkeys(partitions, offset)


async def test_a_partition_whose_takeover_failed_is_taken_over_at_the_next_try() -> None:
    name = STEPS.name("c")
    wanted = {0}
    subscription = Subscription(
        "127.0.0.1:9092",
        [STEPS],
        "c",
        "test",
        from_start=False,
        skipped=SkippedRecords(),
        wanted=lambda _topic, partition: partition in wanted,
    )
    broker: Any = Broker()
    admin = SimpleNamespace(describe_topics=_topics(name))

    async def check() -> None:
        await subscription._assign(broker, await subscription._partitions(cast("Any", admin)))

    await check()
    assert broker.sought == {0: 900}
    wanted.add(1)
    broker.away = True
    with pytest.raises(TimeoutError):
        await check()
    broker.away = False
    await check()
    assert broker.sought == {0: 900, 1: 800}


def _topics(name: str) -> Callable[[], Awaitable[list[dict[str, Any]]]]:
    async def describe_topics() -> list[dict[str, Any]]:
        return [{"topic": name, "partitions": [{"partition": number} for number in range(2)]}]

    return describe_topics


def test_a_backoff_doubles_up_to_its_bound_and_restarts_after_a_success() -> None:
    backoff = Backoff(first_s=0.1, max_s=0.5, draw=lambda: 0.0)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert backoff.failures == 5
    backoff.reset()
    assert (backoff.failures, backoff.next_s()) == (0, 0.1)


def test_clients_of_one_outage_return_at_different_times_within_the_bound() -> None:
    waits = [Backoff(first_s=2.0, max_s=8.0).next_s() for _ in range(200)]
    assert len(set(waits)) > 150
    assert 1.0 <= min(waits) < 1.2 and 1.8 < max(waits) <= 2.0


def test_retry_after_is_never_early_and_spread_if_many_are_refused_at_once() -> None:
    seconds = {int(QueueFull("full", retry_after_s=40).http_headers["retry-after"]) for _ in range(400)}
    assert min(seconds) >= 40 and max(seconds) <= 50 and len(seconds) > 5
    exact = {RateLimited("used", retry_after_s=40, headers={}).http_headers["retry-after"] for _ in range(50)}
    assert exact == {"40"}


def test_clients_do_not_retry_by_themselves_if_the_wait_is_longer_than_two_minutes() -> None:
    shorter = RateLimited("used", retry_after_s=120, headers={}).http_headers
    longer = QueueFull("full", retry_after_s=121).http_headers
    assert "x-should-retry" not in shorter
    assert longer["x-should-retry"] == "false" and int(longer["retry-after"]) >= 121


@pytest.mark.parametrize(
    ("share", "stated_s"), [(0.0, 115), (0.17, 120), (0.18, 120), (0.19, 120), (0.2, 121), (0.99, 143)]
)
def test_the_notice_against_retries_depends_on_the_time_in_the_header(
    monkeypatch: pytest.MonkeyPatch, share: float, stated_s: int
) -> None:
    monkeypatch.setattr("random.random", lambda: share)
    headers = QueueFull("full", retry_after_s=115).http_headers
    assert int(headers["retry-after"]) == stated_s
    assert ("x-should-retry" in headers) == (stated_s > MAX_RETRY_WAIT_S)
