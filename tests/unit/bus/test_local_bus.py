"""Tests of the bus of a service that runs alone."""

import asyncio
from contextlib import suppress

import pytest

from libs.bus import local
from libs.bus.local import LocalBus
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, StepBatch
from libs.contracts.topics import LOADS, QUEUES, STEPS


async def test_every_reader_gets_the_records_of_its_topics_in_order() -> None:
    bus = LocalBus()
    both, steps = bus.subscribe((STEPS, QUEUES)), bus.subscribe((STEPS,))
    bus.publish(STEPS, StepBatch(worker_id="a"))
    bus.publish(QUEUES, GatewayQueues(gateway_id="g"))
    bus.publish(STEPS, StepBatch(worker_id="b"))
    assert [(await anext(both)).key for _ in range(3)] == ["a", "g", "b"]
    assert [(await anext(steps)).key for _ in range(2)] == ["a", "b"]
    assert bus.stats().published == 3


async def test_a_slow_reader_loses_the_oldest_records_and_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_QUEUED_RECORDS", 2)
    bus = LocalBus()
    steps = bus.subscribe((STEPS,))
    for name in "abc":
        bus.publish(STEPS, StepBatch(worker_id=name))
    assert [(await anext(steps)).key for _ in range(2)] == ["b", "c"]
    assert bus.stats().dropped == 1


async def test_readers_end_with_the_bus_and_wrong_messages_are_refused() -> None:
    bus = LocalBus()
    with pytest.raises(TypeError, match="StepBatch"):
        bus.publish(STEPS, GatewayQueues())
    bus.publish(LOADS, LOADS.value())  # without a reader
    steps = bus.subscribe((STEPS,))
    waiting = asyncio.ensure_future(anext(steps))
    await asyncio.sleep(0)
    await bus.close()
    with suppress(StopAsyncIteration):
        await waiting
    assert waiting.done()
