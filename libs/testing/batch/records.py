"""Readers of a suite's records in tests: the in-sync copies of three brokers, telemetry and decisions."""

import asyncio
from collections import defaultdict

from libs.bus.broker import REPLICATION
from libs.bus.clients import CONNECTION_ERRORS, open_admin
from libs.bus.kafka import KafkaLiveBus
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import DECISIONS, STEPS

BACK_S = 180.0
POLL_S = 0.1


async def copies(servers: str, cluster: str) -> dict[str, tuple[int, int]]:
    """Return the fewest copies, and the fewest in sync, of a partition of each topic of the cluster."""
    async with open_admin(servers, "test") as admin:
        topics = await admin.describe_topics()
    return {
        topic["topic"]: (
            min(len(part["replicas"]) for part in topic["partitions"]),
            min(len(part["isr"]) for part in topic["partitions"]),
        )
        for topic in topics
        if topic["topic"].startswith((f"fulcrum.{cluster}.", "__"))
    }


async def until_in_step(servers: str, cluster: str) -> dict[str, tuple[int, int]]:
    """Wait until every copy is in sync, Kafka's own topics included."""
    async with asyncio.timeout(BACK_S):
        while True:
            try:
                found = await copies(servers, cluster)
                if found and all(each == (REPLICATION, REPLICATION) for each in found.values()):
                    return found
            except CONNECTION_ERRORS:
                pass
            await asyncio.sleep(POLL_S)


async def sent(servers: str, cluster: str) -> tuple[dict[tuple[str, int], list[int]], dict[str, list[int]]]:
    """Return the numbers of all telemetry batches by worker and incarnation, and of all decisions by planner.

    A running suite may go on sending: what each partition holds at its turn is read.
    """
    steps: dict[tuple[str, int], list[int]] = defaultdict(list)
    decisions: dict[str, list[int]] = defaultdict(list)
    parts = [(topic, number) for topic in (STEPS, DECISIONS) for number in range(topic.partitions)]
    async with KafkaLiveBus(servers, cluster, "test").back_reader() as reader:
        for topic, partition in parts:
            span = await reader.held(topic, partition)
            async for record in reader.between(topic, partition, span.start, span.end):
                value = record.value
                if isinstance(value, StepBatch):
                    steps[value.worker_id, value.incarnation].append(value.sequence)
                elif isinstance(value, Decision):
                    decisions[value.planner_id].append(value.sequence)
    return steps, decisions
