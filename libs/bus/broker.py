"""Questions to the broker itself: which topics and partitions there are, and to make those that are missing."""

from collections.abc import Mapping, Sequence

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from libs.bus.servers import BrokerAway
from libs.contracts.topics import SEGMENT_BYTES, Topic

REPLICATION = 3
"""Copies of each partition, where there are as many brokers."""
_TOPIC_EXISTS = 36
_OK = 0


async def make_topics(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> None:
    """Make the topics that are missing; raises KafkaError with the broker's reason when it refuses."""
    there = await partitions(admin, topics, cluster)
    missing = [topic for topic in topics if topic.name(cluster) not in there]
    if not missing:
        return
    copies = min(REPLICATION, len((await admin.describe_cluster())["brokers"]))
    new = [
        NewTopic(
            t.name(cluster),
            t.partitions,
            copies,
            topic_configs={"retention.ms": str(t.retention_ms), "segment.bytes": str(SEGMENT_BYTES)},
        )
        for t in missing
    ]
    try:
        answer = await admin.create_topics(new)
    except AttributeError as error:  # aiokafka's, while the cluster has no controller
        raise BrokerAway("the cluster has no controller") from error
    for name, code, *reason in answer.topic_errors:
        if code not in (_OK, _TOPIC_EXISTS):
            raise KafkaError(f"topic {name} cannot be made: error {code} {' '.join(map(str, reason))}")


async def touch_topics(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> None:
    """Have the embedded broker make the topics, which it does for each that is named."""
    await admin.describe_topics([topic.name(cluster) for topic in topics])


async def named_partitions(admin: AIOKafkaAdminClient, name: str) -> Sequence[int]:
    """Partition numbers of a topic by its whole name; empty where there is none."""
    found = (entry for entry in await admin.describe_topics() if entry["topic"] == name)
    return sorted(partition["partition"] for entry in found for partition in entry["partitions"])


async def partitions(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> Mapping[str, Sequence[int]]:
    """Partition numbers by the name of each of `topics` that exists. Asked of all topics: naming one may create it."""
    wanted = {topic.name(cluster) for topic in topics}
    return {
        entry["topic"]: sorted(partition["partition"] for partition in entry["partitions"])
        for entry in await admin.describe_topics()
        if entry["topic"] in wanted and entry["partitions"]
    }
