"""Tests of what stores in memory promise beyond their ports: bounds, and losses when killed during a call."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import STEPS
from libs.testing.memory.broker import RETAINED_RECORDS, Incoming, MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.memory.server import MemoryServer, ServerAway
from libs.testing.memory.store import MemoryStore
from libs.testing.wait import until

CLUSTER = "test"
NAME = STEPS.name(CLUSTER)


def put(broker: MemoryBroker, numbers: range, size_bytes: int = 1) -> None:
    for _ in numbers:
        broker.append(Incoming(NAME, b"w", b"x" * size_bytes, (), 1), partition=0)


@pytest.fixture
def broker() -> MemoryBroker:
    broker = MemoryBroker(retained_records=100, retained_bytes=10_000)
    broker.make({NAME: STEPS.partitions})
    return broker


def test_a_partition_holds_a_bounded_number_of_records_and_offsets_keep_growing(broker: MemoryBroker) -> None:
    put(broker, range(1_000))
    span = broker.partitions(NAME)[0].span
    assert span.end == 1_000
    assert 75 <= span.end - span.start <= 100
    assert [kept.offset for kept in broker.partitions(NAME)[0].read(0, 3)] == [span.start + each for each in range(3)]
    assert RETAINED_RECORDS == 20_000


def test_a_partition_holds_a_bounded_number_of_bytes(broker: MemoryBroker) -> None:
    put(broker, range(50), size_bytes=1_000)
    span = broker.partitions(NAME)[0].span
    assert 7 <= span.end - span.start <= 10


def test_counting_records_fails_if_retention_has_dropped_some(broker: MemoryBroker) -> None:
    put(broker, range(101))
    with pytest.raises(LookupError, match="retention has dropped"):
        broker.values(STEPS, CLUSTER)


async def test_a_reader_overtaken_by_retention_continues_with_the_oldest_record(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker, CLUSTER)
    await bus.start()
    read: list[int] = []
    reading = bus.subscribe([STEPS], from_start=True)
    bus.publish(STEPS, StepBatch(worker_id="w", sequence=0))
    read.append((await anext(reading)).value.sequence)  # type: ignore[attr-defined]
    for number in range(1, 500):
        bus.publish(STEPS, StepBatch(worker_id="w", sequence=number))
    await until(lambda: bus.stats().buffered == 0)
    while read[-1] != 499:
        read.append((await anext(reading)).value.sequence)  # type: ignore[attr-defined]
    assert 70 < len(read[1:]) <= 100
    assert read[1:] == list(range(read[1], 500))
    await bus.close()


class Travels:
    """A network whose ways a test ends one by one."""

    def __init__(self) -> None:
        self.ways: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def travel(self) -> None:
        way = asyncio.get_running_loop().create_future()
        self.ways.put_nowait(way)
        await way

    async def arrive(self) -> None:
        (await self.ways.get()).set_result(None)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_batch_whose_confirmation_was_lost_is_sent_again(broker: MemoryBroker) -> None:
    network = Travels()
    broker = MemoryBroker(travel=network.travel)
    bus = MemoryBus(broker, CLUSTER)
    starting = asyncio.create_task(bus.start())
    await network.arrive()
    await network.arrive()
    await starting
    bus.publish(STEPS, StepBatch(worker_id="w", sequence=7))
    await network.arrive()
    assert len(broker.values(STEPS, CLUSTER)) == 1
    assert (bus.stats().buffered, len(bus.unsent())) == (1, 1)
    broker.cut_off()
    broker.start()
    await network.arrive()  # the confirmation, over a connection that is no more
    for _ in range(4):
        await network.arrive()
    assert broker.values(STEPS, CLUSTER) == [StepBatch(worker_id="w", sequence=7)] * 2
    assert (bus.stats().buffered, bus.unsent()) == (0, [])
    await bus.close()


@pytest.fixture
async def server() -> AsyncIterator[MemoryServer]:
    yield MemoryServer()


async def test_a_call_to_a_frozen_server_times_out_without_effect(server: MemoryServer) -> None:
    calls: list[int] = []
    server.freeze()
    with pytest.raises(ServerAway, match="in time"):
        await server.call(lambda: calls.append(1), timeout_s=0.02)
    server.thaw()
    await server.call(lambda: calls.append(2), timeout_s=1)
    assert calls == [2]


async def test_a_call_interrupted_by_a_kill_is_reset_even_if_the_server_is_back_at_once(server: MemoryServer) -> None:
    call = asyncio.ensure_future(server.call(lambda: "answer", timeout_s=1))
    await asyncio.sleep(0)
    server.kill()
    server.start()
    with pytest.raises(ServerAway, match="reset"):
        await call
    assert await server.call(lambda: "answer", timeout_s=1) == "answer"


async def test_an_unreachable_store_keeps_its_data_and_a_killed_one_loses_them() -> None:
    store = MemoryStore()
    store.announced(CLUSTER, "w", b"value", incarnation=1, lease_ms=60_000)
    store.cut_off()
    store.start()
    assert store.workers(CLUSTER) == {"w": b"value"}
    store.kill()
    store.start()
    assert store.workers(CLUSTER) == {}
