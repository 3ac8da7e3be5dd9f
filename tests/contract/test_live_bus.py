"""Tests over every broker of a subscription that jumps to the end when behind, and of the reader of what it skipped."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from libs.bus import kafka as live
from libs.bus.port import Gap, LiveBus, Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent, StepBatch
from libs.contracts.topics import REQUESTS, STEPS
from libs.policy.reading import Fate, Gaps
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.telemetry.columns import prefill_shares
from libs.testing.contract.brokers import Broker
from libs.testing.wait import until
from libs.testing.workers.telemetry import MS, ORIGIN_NS, step, step_batch
from services.metrics.refill import Refill
from services.metrics.requests import RequestMetrics
from services.metrics.state import MetricsState

BEHIND_S = 0.5
SLOW_S = 0.01
"""Time that a reader needs for a record: publishers are ten times as fast."""


@pytest.fixture
async def bus(broker: Broker, cluster: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveBus]:
    monkeypatch.setattr(live, "BEHIND_S", BEHIND_S)
    bus = broker.live_bus(cluster, "test")
    await bus.start()
    try:
        yield bus
    finally:
        await bus.close()


async def test_a_reader_that_is_too_slow_jumps_and_every_record_is_read_once_by_either_reader(bus: LiveBus) -> None:
    """Topics that do not jump lose nothing either."""
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
                assert not task.done(), "reading has ended"
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


async def test_skipped_records_are_read_back_from_the_broker_into_history(bus: LiveBus) -> None:
    """Two workers send for forty seconds, and the live reader gets the first five seconds and the last."""
    clock, seconds = SystemClock(), 40
    state, gaps, tasks = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry())), Gaps(), TaskOwner()
    end_ms = (clock.now_ns() - ORIGIN_NS) // MS // 1000 * 1000
    begin_ms, workers = end_ms - 1000 * seconds, ("decode-0", "decode-1")

    def batches(worker: str) -> list[StepBatch]:
        lows = range(begin_ms, end_ms, 100)
        return [
            step_batch(number, (low, low + 100), [step(low + 20, low + 70, decode=1)], worker=worker)
            for number, low in enumerate(lows)
        ]

    reported = [batch for pair in zip(*map(batches, workers), strict=True) for batch in pair]
    records: list[Record] = []

    async def read() -> None:
        async for record in bus.subscribe([STEPS], since_unix_ns=0):
            records.append(record)  # noqa: PERF401  (it never ends)

    tasks.spawn("reading", read())
    try:
        for batch in reported:
            bus.publish(STEPS, batch)
        await until(lambda: len(records) == len(reported))
        held_back: dict[int, list[int]] = {}
        state.history.resume(begin_ms * MS + ORIGIN_NS)
        for second in range(seconds):
            at_ns = (begin_ms + 1000 * second) * MS + ORIGIN_NS
            for record in records:
                assert isinstance(record.value, StepBatch)
                if at_ns <= record.value.covered_from_unix_ns < at_ns + 1000 * MS:
                    if 5 <= second < seconds - 5:
                        held_back.setdefault(record.partition, []).append(record.offset)
                    else:
                        state.take(record, clock.now_ns())
            state.history.advance(at_ns + 1000 * MS)
        refill = Refill(state, gaps, prefill_shares, clock)
        for partition, offsets in held_back.items():
            assert max(offsets) - min(offsets) + 1 == len(offsets)
            refill.note(Gap(STEPS, partition, min(offsets), max(offsets) + 1))
        tasks.spawn("refill", refill.run(bus.back_reader))
        await until(lambda: not gaps.records, timeout_s=60.0)  # a fifth of a core processes them on any machine
    finally:
        await tasks.close()
    assert gaps.fates[Fate.FILLED] == (seconds - 10) * 10 * len(workers)
    series = state.rollups.read(10**9, begin_ms * MS + ORIGIN_NS, end_ms * MS + ORIGIN_NS, workers)
    assert series.times_ns.tolist() == [[[1000 * MS, 0, 500 * MS, 0]] * 2] * seconds
