"""Tests of the watch that finds brokers which this process alone cannot reach."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import NodeNotReadyError

from libs.bus import reach as watch
from libs.bus.clients import BrokerAway
from libs.bus.reach import BrokerReach
from libs.policy.copies import UnreachableBroker, UnreachableBrokers
from libs.runtime.tasks import end


class Client:
    """A client of brokers 1 to 3, of which broker 2 leads two partitions of suite "c" and one of another."""

    def __init__(self) -> None:
        self.away: set[int] = set()
        self.described = True
        led = {TopicPartition("fulcrum.c.steps.v2", 0), TopicPartition("fulcrum.c.steps.v2", 1)}
        leads = {2: led | {TopicPartition("fulcrum.other.steps.v2", 0)}}
        brokers = {Listed(nodeId=number, host=f"k{number}", port=9092) for number in (1, 2, 3)}
        self.cluster = SimpleNamespace(brokers=lambda: brokers, partitions_for_broker=leads.get)

    async def force_metadata_update(self) -> bool:
        return self.described

    async def send(self, node: int, _request: Any) -> None:
        if node in self.away:
            raise NodeNotReadyError


class Listed(SimpleNamespace):
    """A broker of a set."""

    def __hash__(self) -> int:  # type: ignore[override]
        return int(self.nodeId)


async def test_a_broker_that_does_not_answer_is_named_with_the_suites_partitions_that_it_leads() -> None:
    reach, client = BrokerReach("k1:9092", "c", "test", "node-a"), Client()
    assert await reach._probe(client) == 3
    assert reach.found == UnreachableBrokers("node-a")
    client.away = {2}
    await reach._probe(client)
    assert reach.found == UnreachableBrokers("node-a", (UnreachableBroker(2, "k2:9092", 2),))


async def test_nothing_is_known_while_no_broker_answers() -> None:
    reach, client = BrokerReach("k1:9092", "c", "test", "node-a"), Client()
    client.away = {1, 2, 3}
    await reach._probe(client)
    assert reach.found is None
    client.described = False
    with pytest.raises(BrokerAway):
        await reach._probe(client)


async def test_a_round_that_does_not_end_is_given_up_and_the_client_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Client):
        async def force_metadata_update(self) -> bool:
            await asyncio.Event().wait()
            return True

    opened, closed, again = [], [], asyncio.Event()

    @asynccontextmanager
    async def open_admin(*_: Any) -> AsyncIterator[SimpleNamespace]:
        opened.append(Hanging())
        if len(opened) == 2:
            again.set()
        try:
            yield SimpleNamespace(_client=opened[-1])
        finally:
            closed.append(opened[-1])

    monkeypatch.setattr(watch, "open_admin", open_admin)
    monkeypatch.setattr(watch, "PROBE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(watch, "PROBE_S", 0.0)
    reach = BrokerReach("k1:9092", "c", "test", "node-a")
    reach.found = UnreachableBrokers("node-a")
    running = asyncio.create_task(reach.run())
    try:
        async with asyncio.timeout(30):
            await again.wait()
        assert closed[0] is opened[0] and reach.found is None
    finally:
        await end(running)
