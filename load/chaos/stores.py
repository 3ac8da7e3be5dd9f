"""The Redis and the broker of a run: stores in memory, reached over a network whose delays a seed draws."""

import asyncio
from random import Random
from zlib import crc32

from google.protobuf.message import Message

from libs.contracts.topics import ALL, Topic
from libs.testing.memory.broker import RETAINED_RECORDS, MemoryBroker
from libs.testing.memory.store import MemoryStore
from load.chaos.loop import SimLoop

CLUSTER = "simulated"
# The least travel time; a message takes up to twice as long.
ONE_WAY_S = 0.00025


class Stores:
    """The stores that all nodes of a run share."""

    def __init__(self, loop: SimLoop, random: Random, *, retained_records: int = RETAINED_RECORDS) -> None:
        """`retained_records` is how many a partition of a topic keeps."""
        self._loop = loop
        self._random = random
        self.late_s = 0.0
        """The longest delay with which the registry publishes changes."""
        self.redis = MemoryStore(travel=self._travel, news_travel=self._travel_late)
        self.broker = MemoryBroker(travel=self._travel, retained_records=retained_records)

    def records(self, topic: Topic, *, since_unix_ns: int = 0) -> list[Message]:
        """Return all records that the broker has taken of a topic; each key's are in order."""
        return self.broker.values(topic, CLUSTER, since_unix_ns=since_unix_ns)

    def digest(self) -> int:
        """Return a digest of every record: equal histories have equal ones."""
        digest = 0
        for topic in ALL:
            for value in self.records(topic):
                # Maps are written in any order otherwise.
                digest = crc32(value.SerializeToString(deterministic=True), digest)
        return digest

    def heal(self) -> None:
        """Make both stores answer at once again."""
        self.late_s = 0.0
        for server in (self.redis, self.broker):
            server.start()
            server.thaw()

    async def _travel(self) -> None:
        await self._pass(ONE_WAY_S * (1 + self._random.random()))

    async def _travel_late(self) -> None:
        await self._pass(ONE_WAY_S + self.late_s * self._random.random())

    async def _pass(self, delay_s: float) -> None:
        # The network's own time, not a timer of the process that waits.
        arrived = self._loop.create_future()
        self._loop.after(delay_s, _arrive, arrived)
        await arrived


def _arrive(arrived: "asyncio.Future[None]") -> None:
    if not arrived.done():
        arrived.set_result(None)
