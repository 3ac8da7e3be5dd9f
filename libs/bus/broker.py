"""Questions to the broker itself: which topics and partitions there are, and to make those that are missing."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from libs.bus.clients import BrokerAway
from libs.contracts.topics import SEGMENT_BYTES, Topic

log = structlog.get_logger()

REPLICATION = 3
"""Copies of each partition, where there are as many brokers."""
IN_SYNC = 2
"""Copies that must have a record before it counts as written, of REPLICATION or more: what was acknowledged outlives
any one broker, and one broker may be away. Of two copies it would take both, and any restart would stop writing."""
IN_SYNC_SETTING = "min.insync.replicas"
SEEN_POLLS, SEEN_POLL_S = 10, 0.1
"""A topic that has not been seen after that long is not there."""
_TOPIC_EXISTS = 36
_OK = 0


async def make_topics(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> None:
    """Make the topics that are missing; raises KafkaError with the broker's reason when it refuses."""
    described = await _described(admin, topics, cluster)
    await _tell_weak(admin, described)
    there = {entry["topic"] for entry in described}
    missing = [topic for topic in topics if topic.name(cluster) not in there]
    if not missing:
        return
    copies = min(REPLICATION, len((await admin.describe_cluster())["brokers"]))
    new = [NewTopic(t.name(cluster), t.partitions, copies, topic_configs=topic_settings(t, copies)) for t in missing]
    try:
        answer = await admin.create_topics(new)
    except AttributeError as error:  # aiokafka's, while the cluster has no controller
        raise BrokerAway("the cluster has no controller") from error
    for name, code, *reason in answer.topic_errors:
        if code not in (_OK, _TOPIC_EXISTS):
            raise KafkaError(f"topic {name} cannot be made: error {code} {' '.join(map(str, reason))}")


def topic_settings(topic: Topic, copies: int) -> dict[str, str]:
    """What a topic is made with."""
    settings = {"retention.ms": str(topic.retention_ms), "segment.bytes": str(SEGMENT_BYTES)}
    return settings | ({IN_SYNC_SETTING: str(IN_SYNC)} if copies >= REPLICATION else {})


async def _tell_weak(admin: AIOKafkaAdminClient, described: Iterable[Mapping[str, Any]]) -> None:
    """Say which topics lose records with one broker though they have the copies to keep them. They are left as they
    are: an operator may have set them so, and a change would stop writers where copies are out of step."""
    copied = [entry["topic"] for entry in described if min(map(_copies, entry["partitions"])) >= REPLICATION]
    if not copied:
        return
    asked = [ConfigResource(ConfigResourceType.TOPIC, name, {IN_SYNC_SETTING: ""}) for name in copied]
    weak = weak_topics(resource for answer in await admin.describe_configs(asked) for resource in answer.resources)
    if weak:
        log.warning(
            f"topics with {REPLICATION} copies count a record as written when one broker has it:"
            f" set {IN_SYNC_SETTING}={IN_SYNC} on each",
            topics=weak,
        )


def weak_topics(resources: Iterable[Sequence[Any]]) -> list[str]:
    """Names of the described topics that fewer than IN_SYNC copies are enough for; one that
    it does not tell about is not among them."""
    return sorted(
        name
        for code, _reason, _kind, name, settings in resources
        for setting, value, *_ in settings
        if code == _OK and setting == IN_SYNC_SETTING and value is not None and int(value) < IN_SYNC
    )


def _copies(partition: Mapping[str, Any]) -> int:
    return len(partition["replicas"])


async def named_partitions(admin: AIOKafkaAdminClient, name: str) -> Sequence[int]:
    """Partition numbers of a topic by its whole name; empty where there is none.

    It is looked for among all topics, since a broker may make what is named, and more than once, since brokers tell of
    a topic a moment after it has been made.
    """
    for again_s in (*(SEEN_POLL_S,) * SEEN_POLLS, 0.0):
        found = (entry for entry in await admin.describe_topics() if entry["topic"] == name)
        if numbers := sorted(partition["partition"] for entry in found for partition in entry["partitions"]):
            return numbers
        await asyncio.sleep(again_s)
    return ()


async def partitions(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> Mapping[str, Sequence[int]]:
    """Partition numbers by the name of each of `topics` that exists."""
    return {
        entry["topic"]: sorted(partition["partition"] for partition in entry["partitions"])
        for entry in await _described(admin, topics, cluster)
    }


async def _described(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> list[Mapping[str, Any]]:
    """Those that exist. Asked of all topics: naming one may create it."""
    wanted = {topic.name(cluster) for topic in topics}
    return [entry for entry in await admin.describe_topics() if entry["topic"] in wanted and entry["partitions"]]
