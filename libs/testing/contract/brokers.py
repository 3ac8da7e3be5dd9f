"""Brokers under the contract of the bus: their clients, and the actions of strangers and operators.

The implementations are Kafka, embedded or real, and a broker in memory.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from libs.bus import kafka as live
from libs.bus.kafka import KafkaBus, KafkaLiveBus
from libs.bus.port import Bus, LiveBus
from libs.contracts.topics import ALL, Topic
from libs.testing.memory.broker import Incoming, MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.memory.server import KillableServer
from libs.testing.servers.stores import KafkaServer

Headers = Sequence[tuple[str, bytes]]
SEEN_S = 10.0
"""The time within which even a busy broker lists a new topic."""
AGES_AGO_NS = 1


class Broker(Protocol):
    """One broker and its server."""

    @property
    def server(self) -> KillableServer:
        """The broker's process, or its stand-in."""
        ...

    def bus(self, cluster: str, client_id: str, *, topics: Sequence[Topic] = ALL) -> Bus:
        """Return a new bus, not started yet."""
        ...

    def live_bus(self, cluster: str, client_id: str) -> LiveBus:
        """Return a new live bus, not started yet, which is behind after libs.bus.kafka.BEHIND_S."""
        ...

    def bus_to_nobody(self, cluster: str) -> Bus:
        """Return a bus whose broker does not exist."""
        ...

    async def put(
        self, topic: str, values: Sequence[tuple[bytes | None, Headers]], partition: int | None = None
    ) -> None:
        """Write records under the key "w" as any client may, whatever they contain."""
        ...

    async def grow(self, topic: str, partitions: int) -> None:
        """Extend a topic to more partitions."""
        ...

    async def partitions(self, topics: Sequence[str]) -> Mapping[str, int]:
        """Return the number of partitions of each topic, once all topics exist."""
        ...


class KafkaUnderTest:
    """A Kafka process."""

    def __init__(self, kafka: KafkaServer) -> None:
        self._servers = kafka.servers
        self.server = kafka.server

    def bus(self, cluster: str, client_id: str, *, topics: Sequence[Topic] = ALL) -> KafkaBus:
        return KafkaBus(self._servers, cluster, client_id, topics=topics)

    def live_bus(self, cluster: str, client_id: str) -> KafkaLiveBus:
        return KafkaLiveBus(self._servers, cluster, client_id)

    def bus_to_nobody(self, cluster: str) -> KafkaBus:
        """Return a bus to port 1, on which nothing listens."""
        return KafkaBus("127.0.0.1:1", cluster, "alone")

    async def put(
        self, topic: str, values: Sequence[tuple[bytes | None, Headers]], partition: int | None = None
    ) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self._servers)
        await producer.start()
        try:
            async with asyncio.timeout(SEEN_S):
                while partition is not None and partition not in await producer.partitions_for(topic):
                    await producer.client.force_metadata_update()
            for value, headers in values:
                await producer.send_and_wait(topic, value, key=b"w", headers=list(headers), partition=partition)
        finally:
            await producer.stop()

    async def grow(self, topic: str, partitions: int) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._servers)
        await admin.start()
        await admin.create_partitions({topic: NewPartitions(total_count=partitions)})
        await admin.close()

    async def partitions(self, topics: Sequence[str]) -> Mapping[str, int]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._servers)
        await admin.start()
        made: dict[str, int] = {}
        async with asyncio.timeout(SEEN_S):
            while not made.keys() >= set(topics):
                made = {topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics()}
        await admin.close()
        return {topic: made[topic] for topic in topics}


class MemoryUnderTest:
    """A broker in memory."""

    def __init__(self) -> None:
        self.server = self._broker = MemoryBroker()

    def bus(self, cluster: str, client_id: str, *, topics: Sequence[Topic] = ALL) -> MemoryBus:
        return MemoryBus(self._broker, cluster, topics=topics)

    def live_bus(self, cluster: str, client_id: str) -> MemoryBus:
        return MemoryBus(self._broker, cluster, behind_s=live.BEHIND_S)

    def bus_to_nobody(self, cluster: str) -> MemoryBus:
        """Return a bus to a broker that was killed."""
        nobody = MemoryBroker()
        nobody.kill()
        return MemoryBus(nobody, cluster)

    async def put(
        self, topic: str, values: Sequence[tuple[bytes | None, Headers]], partition: int | None = None
    ) -> None:
        for value, headers in values:
            self._broker.append(Incoming(topic, b"w", value, headers, AGES_AGO_NS), partition)

    async def grow(self, topic: str, partitions: int) -> None:
        self._broker.make({topic: partitions})

    async def partitions(self, topics: Sequence[str]) -> Mapping[str, int]:
        return {topic: len(self._broker.partitions(topic)) for topic in topics}
