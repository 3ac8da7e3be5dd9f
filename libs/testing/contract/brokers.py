"""A broker as the contract of the bus sees it: what connects to it, and what strangers and operators do to it. Over
Kafka, embedded or real, and in memory."""

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
"""A busy broker lists what it has made a moment later."""
AGES_AGO_NS = 1


class Broker(Protocol):
    """One broker and its server."""

    @property
    def server(self) -> KillableServer:
        """Its process, or what stands for one."""
        ...

    def bus(self, cluster: str, client_id: str, *, topics: Sequence[Topic] = ALL) -> Bus:
        """Not started yet."""
        ...

    def live_bus(self, cluster: str, client_id: str) -> LiveBus:
        """Not started yet; it is behind after libs.bus.kafka.BEHIND_S."""
        ...

    def bus_to_nobody(self, cluster: str) -> Bus:
        """A bus whose broker is not there."""
        ...

    async def put(
        self, topic: str, values: Sequence[tuple[bytes | None, Headers]], partition: int | None = None
    ) -> None:
        """Write records under the key "w" as any client may, whatever they hold."""
        ...

    async def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        ...

    async def partitions(self, topics: Sequence[str]) -> Mapping[str, int]:
        """How many each of these has, once all are there."""
        ...


class KafkaUnderTest:
    """Over a process."""

    def __init__(self, kafka: KafkaServer) -> None:
        self._servers = kafka.servers
        self.server = kafka.server

    def bus(self, cluster: str, client_id: str, *, topics: Sequence[Topic] = ALL) -> KafkaBus:
        """Not started yet."""
        return KafkaBus(self._servers, cluster, client_id, topics=topics)

    def live_bus(self, cluster: str, client_id: str) -> KafkaLiveBus:
        """Not started yet."""
        return KafkaLiveBus(self._servers, cluster, client_id)

    def bus_to_nobody(self, cluster: str) -> KafkaBus:
        """Nobody listens on port 1."""
        return KafkaBus("127.0.0.1:1", cluster, "alone")

    async def put(
        self, topic: str, values: Sequence[tuple[bytes | None, Headers]], partition: int | None = None
    ) -> None:
        """Write records by a producer of its own."""
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
        """By an admin client."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self._servers)
        await admin.start()
        await admin.create_partitions({topic: NewPartitions(total_count=partitions)})
        await admin.close()

    async def partitions(self, topics: Sequence[str]) -> Mapping[str, int]:
        """By an admin client."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self._servers)
        await admin.start()
        made: dict[str, int] = {}
        async with asyncio.timeout(SEEN_S):
            while not made.keys() >= set(topics):
                made = {topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics()}
        await admin.close()
        return {topic: made[topic] for topic in topics}


class MemoryUnderTest:
    """In memory."""

    def __init__(self) -> None:
        self.server = self._broker = MemoryBroker()

    def bus(self, cluster: str, client_id: str, *, topics: Sequence[Topic] = ALL) -> MemoryBus:
        """Not started yet."""
        return MemoryBus(self._broker, cluster, topics=topics)

    def live_bus(self, cluster: str, client_id: str) -> MemoryBus:
        """Not started yet."""
        return MemoryBus(self._broker, cluster, behind_s=live.BEHIND_S)

    def bus_to_nobody(self, cluster: str) -> MemoryBus:
        """A broker that has been killed."""
        nobody = MemoryBroker()
        nobody.kill()
        return MemoryBus(nobody, cluster)

    async def put(
        self, topic: str, values: Sequence[tuple[bytes | None, Headers]], partition: int | None = None
    ) -> None:
        """At once."""
        for value, headers in values:
            self._broker.append(Incoming(topic, b"w", value, headers, AGES_AGO_NS), partition)

    async def grow(self, topic: str, partitions: int) -> None:
        """At once."""
        self._broker.make({topic: partitions})

    async def partitions(self, topics: Sequence[str]) -> Mapping[str, int]:
        """As it is."""
        return {topic: len(self._broker.partitions(topic)) for topic in topics}
