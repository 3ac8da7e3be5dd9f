"""Redis and Kafka as the services' ports see them: shared, slow, forgetful, sometimes away."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any

from libs.bus.port import BusStats, Wanted
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.topics import Topic
from libs.kvindex.port import KvIndexStats, PrefixQuery
from libs.registry.port import RegistryDown, RegistryStats
from load.chaos.loop import Node, SimLoop

ROUND_TRIP_S = 0.0005
AWAY_S = 0.05
"""How soon a call learns that the store is away."""


class Store:
    """What one Redis and one broker hold, for all nodes."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        self.away = False
        self.late_s = 0.0
        """How long at most the registry keeps news to itself."""
        self.workers: dict[str, tuple[Worker, float]] = {}
        self.blocks: dict[str, set[bytes]] = {}
        self.broker = Broker()
        self.watchers: dict[asyncio.Event, None] = {}

    def lose(self) -> None:
        """Redis restarts empty."""
        self.workers.clear()
        self.blocks.clear()

    async def trip(self) -> bool:
        """A round trip; False when nobody answered."""
        if self.away:
            await asyncio.sleep(AWAY_S)
            return False
        await asyncio.sleep(ROUND_TRIP_S * (1 + self.random.random()))
        return not self.away

    def changed(self) -> None:
        """Tell watchers, each in its own time."""
        for event in self.watchers:
            self.loop.after(self.late_s * self.random.random(), event.set)


class Broker:
    """What was published, and by whom. While it is away, publishers keep what they have to say."""

    def __init__(self) -> None:
        self.away = False
        self.kept: list[Any] = []
        self.lost: list[Any] = []
        """With processes that were killed before it was back."""
        self._waiting: list[tuple[Node, Any]] = []

    def publish(self, node: Node, value: Any) -> None:
        """Take a record, or leave it with its publisher."""
        if self.away:
            self._waiting.append((node, value))
        else:
            self.kept.append(value)

    def waiting(self, node: Node) -> int:
        """Records that a publisher still has."""
        return sum(each is node for each, _ in self._waiting)

    def back(self) -> None:
        """Here again: takes what waited."""
        self.away = False
        self.kept += [value for _, value in self._waiting]
        self._waiting.clear()

    def killed(self, node: Node) -> None:
        """A publisher is gone, with what it had."""
        self.lost += [value for each, value in self._waiting if each is node]
        self._waiting = [(each, value) for each, value in self._waiting if each is not node]


class SimRegistry:
    """Registry."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Register or renew."""
        await self._reach()
        store, copy = self._store, Worker()
        copy.CopyFrom(worker)
        held = store.workers.get(worker.id)
        if held is not None and held[0].incarnation > worker.incarnation and held[1] > store.loop.time():
            return
        store.workers[worker.id] = (copy, store.loop.time() + lease_ms / 1000)
        if held is None or held[0] != copy:
            store.changed()

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove, unless a newer incarnation is there."""
        await self._reach()
        held = self._store.workers.get(worker_id)
        if held is not None and held[0].incarnation <= incarnation:
            del self._store.workers[worker_id]
            self._store.changed()

    async def workers(self) -> list[Worker]:
        """Those whose lease holds."""
        await self._reach()
        now_s = self._store.loop.time()
        return [worker for _, (worker, until_s) in sorted(self._store.workers.items()) if until_s > now_s]

    async def watch(self, *, poll_ms: int = 1000) -> AsyncIterator[list[Worker]]:
        """At changes and at least every `poll_ms`."""
        event = asyncio.Event()
        self._store.watchers[event] = None
        try:
            while True:
                event.clear()
                try:
                    yield await self.workers()
                    async with asyncio.timeout(poll_ms / 1000):
                        await event.wait()
                except RegistryDown:
                    await asyncio.sleep(poll_ms / 1000)
                except TimeoutError:
                    continue
        finally:
            self._store.watchers.pop(event, None)

    def stats(self) -> RegistryStats:
        """Nothing is skipped here."""
        return RegistryStats()

    async def close(self) -> None:
        """Nothing to disconnect."""

    async def _reach(self) -> None:
        if not await self._store.trip():
            raise RegistryDown("the simulated store is away")


class SimKvIndex:
    """KvIndex."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """List blocks."""
        if await self._store.trip():
            held = self._store.blocks.setdefault(worker_id, set())
            held.update(stored)
            held.difference_update(removed)

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        """Leases are long here: a stale index must do no harm."""
        await self._store.trip()

    async def forget(self, model: str, worker_id: str) -> None:
        """Drop a worker's blocks."""
        if await self._store.trip():
            self._store.blocks.pop(worker_id, None)

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        """Leading blocks by worker."""
        if not await self._store.trip():
            return [[{} for _ in query.prompts] for query in queries]
        return [[self._held(prompt, query.worker_ids) for prompt in query.prompts] for query in queries]

    def stats(self) -> KvIndexStats:
        """Not counted."""
        return KvIndexStats(0, 0, 0)

    def _held(self, prompt: Sequence[bytes], worker_ids: Sequence[str]) -> dict[str, int]:
        found = {}
        for worker_id in worker_ids:
            blocks = self._store.blocks.get(worker_id, set())
            count = next((place for place, block in enumerate(prompt) if block not in blocks), len(prompt))
            if count:
                found[worker_id] = count
        return found

    async def close(self) -> None:
        """Nothing to disconnect."""


class SimBus:
    """Bus, for what is published only."""

    def __init__(self, store: Store, node: Node) -> None:
        self._store, self._node = store, node
        self._published = 0

    async def start(self) -> None:
        """Always there."""

    def publish(self, topic: Topic, value: Any) -> None:
        """Keep it."""
        self._published += 1
        self._store.broker.publish(self._node, value)

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Any]:
        """Nobody here reads."""
        raise NotImplementedError

    def stats(self) -> BusStats:
        """Nothing is dropped."""
        buffered = self._store.broker.waiting(self._node)
        return BusStats(published=self._published, dropped=0, buffered=buffered, undecodable=0)

    async def close(self) -> None:
        """Nothing to send."""
