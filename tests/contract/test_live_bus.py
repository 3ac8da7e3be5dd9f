"""A subscription that jumps to the end where it is behind, and the reader of what it left out, over every broker."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from libs.bus import live
from libs.bus.live import LiveBus
from libs.bus.subscription import Gap
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent, StepBatch
from libs.contracts.topics import REQUESTS, STEPS
from libs.testing.stores import KafkaServer
from libs.testing.wait import until

BEHIND_S = 0.5
SLOW_S = 0.01
"""That a reader takes for a record: publishers are ten times as fast."""


@pytest.fixture
async def bus(kafka: KafkaServer, cluster: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveBus]:
    monkeypatch.setattr(live, "BEHIND_S", BEHIND_S)
    bus = LiveBus(kafka.servers, cluster, "test")
    await bus.start()
    try:
        yield bus
    finally:
        await bus.close()


async def test_a_reader_that_is_too_slow_jumps_and_every_record_is_read_once_here_or_there(bus: LiveBus) -> None:
    """And topics that do not jump lose nothing to it."""
    gaps: list[Gap] = []
    steps: list[tuple[int, int]] = []
    requests: list[str] = []
    slow = True

    async def read() -> None:
        async for record in bus.subscribe_live(
            (STEPS, REQUESTS), jumping=(STEPS,), on_gap=gaps.append, since_unix_ns=0
        ):
            if isinstance(record.value, RequestEvent):
                requests.append(record.value.request_id)
                continue
            assert isinstance(record.value, StepBatch)
            steps.append((record.offset, record.value.sequence))
            if slow:
                await asyncio.sleep(SLOW_S)

    task = asyncio.get_running_loop().create_task(read())
    sent = 0
    try:
        async with asyncio.timeout(60):
            while not gaps:
                for _ in range(50):
                    bus.publish(STEPS, StepBatch(worker_id="w", sequence=sent))
                    sent += 1
                bus.publish(REQUESTS, RequestEvent(request_id=f"r{sent}"))
                await asyncio.sleep(0.05)
        slow = False
        for _ in range(100):
            bus.publish(STEPS, StepBatch(worker_id="w", sequence=sent))
            sent += 1
        await until(lambda: bool(steps) and steps[-1][1] == sent - 1)
        read_live = [number for _, number in steps]
        async with bus.back_reader() as reader:
            found = [
                record.value.sequence
                for gap in gaps
                async for record in reader.between(gap.topic, gap.partition, gap.start, gap.end)
                if isinstance(record.value, StepBatch)
            ]
            assert all(gap.run == reader.run for gap in gaps)
        assert found
        assert sorted(read_live + found) == list(range(sent))
        assert [offset for offset, _ in steps] == sorted(offset for offset, _ in steps)
        await until(lambda: len(requests) == len(set(requests)) > 0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_reader_that_keeps_up_never_jumps(bus: LiveBus) -> None:
    gaps: list[Gap] = []
    steps: list[int] = []

    async def read() -> None:
        async for record in bus.subscribe_live((STEPS,), jumping=(STEPS,), on_gap=gaps.append, since_unix_ns=0):
            assert isinstance(record.value, StepBatch)
            steps.append(record.value.sequence)

    task = asyncio.get_running_loop().create_task(read())
    try:
        for number in range(60):
            bus.publish(STEPS, StepBatch(worker_id="w", sequence=number))
            await until(lambda number=number: steps[-1:] == [number])
            await asyncio.sleep(0.05)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert gaps == []
    assert steps == list(range(60))
