"""Administration of the broker: topics and partitions, missing topics, and a group's committed offsets."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from libs.bus.clients import BrokerAway
from libs.contracts.topics import SEGMENT_BYTES, Topic
from libs.policy.copies import PartitionCopies

log = structlog.get_logger()

REPLICATION = 3
"""The copies of each partition, if there are as many brokers."""
# Copies that must have a record before it counts as written, given at least REPLICATION copies. Acknowledged records
# then survive the loss of any one broker, and one broker may be away. With two copies, both would be needed, and any
# restart would stop writing.
IN_SYNC = 2
IN_SYNC_SETTING = "min.insync.replicas"
# A topic that has not appeared within these polls does not exist.
SEEN_POLLS, SEEN_POLL_S = 10, 0.1
_TOPIC_EXISTS = 36
_OK = 0


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of each new topic."""

    each: int = 0
    """The copies of each partition; 0 is REPLICATION, or one for each broker if there are fewer."""
    in_sync: int = 0
    """The copies that must have a record before it counts as written; 0 is IN_SYNC of three or more copies, otherwise
    1.
    """

    def wanted(self, brokers: int, named: int) -> int:
        """Return the copies of a new topic, given the brokers that are up and the addresses that name them.

        A cluster of which some brokers are still starting must not leave topics with fewer copies forever.
        """
        return self.each or min(REPLICATION, max(brokers, named))

    def needed(self, copies: int) -> int:
        """Return how many of `copies` must have a record; 0 leaves that to the broker."""
        return min(self.in_sync, copies) or (IN_SYNC if copies >= REPLICATION else 0)


def named_brokers(servers: str) -> int:
    """Return the number of distinct addresses in HOST:PORT[,HOST:PORT...]."""
    return len({each.strip() for each in servers.split(",") if each.strip()})


async def make_topics(
    admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str, wanted: Copies | None = None, named: int = 1
) -> None:
    """Create the missing topics, with as many copies as `wanted` of the `named` brokers.

    Raise BrokerAway while too few brokers are up, and KafkaError with the broker's reason if it refuses.
    """
    wanted = wanted or Copies()
    described = await describe(admin, topics, cluster)
    brokers = len((await admin.describe_cluster())["brokers"])
    _warn_of_few_copies(described, min(wanted.wanted(brokers, named), brokers))
    await _warn_of_weak_topics(admin, described)
    there = {entry["topic"] for entry in described}
    missing = [topic for topic in topics if topic.name(cluster) not in there]
    if not missing:
        return
    copies = wanted.wanted(brokers, named)
    if copies > brokers:
        raise BrokerAway(
            f"{brokers} of the {copies} brokers are up that new topics need: start the others, or set"
            f" FULCRUM_KAFKA_COPIES={brokers}"
        )
    settings = {topic: topic_settings(topic, copies, wanted) for topic in missing}
    new = [NewTopic(t.name(cluster), t.partitions, copies, topic_configs=settings[t]) for t in missing]
    try:
        answer = await admin.create_topics(new)
    except AttributeError as error:  # raised by aiokafka while the cluster has no controller
        raise BrokerAway("the cluster has no controller") from error
    for name, code, *reason in answer.topic_errors:
        if code not in (_OK, _TOPIC_EXISTS):
            raise KafkaError(f"topic {name} cannot be made: error {code} {' '.join(map(str, reason))}")


def topic_settings(topic: Topic, copies: int, wanted: Copies | None = None) -> dict[str, str]:
    settings = {"retention.ms": str(topic.retention_ms), "segment.bytes": str(SEGMENT_BYTES)}
    needed = (wanted or Copies()).needed(copies)
    return settings | ({IN_SYNC_SETTING: str(needed)} if needed else {})


def few_copies(described: Iterable[Mapping[str, Any]], wanted: int) -> list[str]:
    """Return the names of the described topics with a partition of fewer copies than `wanted`."""
    return sorted(entry["topic"] for entry in described if min(map(_copies, entry["partitions"])) < wanted)


def _warn_of_few_copies(described: Iterable[Mapping[str, Any]], wanted: int) -> None:
    """Warn of topics that were created while there were fewer brokers. Only an operator can move their partitions."""
    if few := few_copies(described, wanted):
        log.warning(
            f"topics have fewer than {wanted} copies, and stop or lose records with one broker: add copies with"
            " kafka-reassign-partitions.sh",
            topics=few,
        )


async def _warn_of_weak_topics(admin: AIOKafkaAdminClient, described: Iterable[Mapping[str, Any]]) -> None:
    """Warn of topics that lose records with one broker although they have enough copies.

    Their settings stay unchanged: an operator may have chosen them, and a change would stop writers while copies
    are out of step.
    """
    copied = [entry["topic"] for entry in described if min(map(_copies, entry["partitions"])) >= REPLICATION]
    if not copied:
        return
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, {IN_SYNC_SETTING: ""}) for name in copied]
    weak = weak_topics(resource for answer in await admin.describe_configs(resources) for resource in answer.resources)
    if weak:
        log.warning(
            f"topics with {REPLICATION} copies count a record as written when one broker has it:"
            f" set {IN_SYNC_SETTING}={IN_SYNC} on each",
            topics=weak,
        )


def weak_topics(resources: Iterable[Sequence[Any]]) -> list[str]:
    """Return the names of the described topics that need fewer than IN_SYNC copies. Topics without that setting are
    left out.
    """
    return sorted(
        name
        for code, _reason, _kind, name, settings in resources
        for setting, value, *_ in settings
        if code == _OK and setting == IN_SYNC_SETTING and value is not None and int(value) < IN_SYNC
    )


def _copies(partition: Mapping[str, Any]) -> int:
    return len(partition["replicas"])


async def named_partitions(admin: AIOKafkaAdminClient, name: str) -> Sequence[int]:
    """Return the partition numbers of a topic by its full name, or nothing if it does not exist.

    All topics are listed, since a broker may create a topic on request. This is repeated, since brokers list a new
    topic only after a moment.
    """
    for again_s in (*(SEEN_POLL_S,) * SEEN_POLLS, 0.0):
        found = (entry for entry in await admin.describe_topics() if entry["topic"] == name)
        if there := sorted(partition["partition"] for entry in found for partition in entry["partitions"]):
            return there
        await asyncio.sleep(again_s)
    return ()


async def partitions(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> Mapping[str, Sequence[int]]:
    """Return partition numbers by name for each of `topics` that exists."""
    return numbers(await describe(admin, topics, cluster))


def numbers(described: Iterable[Mapping[str, Any]]) -> Mapping[str, Sequence[int]]:
    """Return partition numbers by name of each described topic."""
    return {entry["topic"]: sorted(partition["partition"] for partition in entry["partitions"]) for entry in described}


def copies(described: Iterable[Mapping[str, Any]]) -> Iterator[PartitionCopies]:
    """Yield the copies of each described partition."""
    for entry in described:
        for each in entry["partitions"]:
            yield PartitionCopies(each["leader"], tuple(each["replicas"]), tuple(each["isr"]))


async def describe(admin: AIOKafkaAdminClient, topics: Sequence[Topic], cluster: str) -> list[Mapping[str, Any]]:
    """Return the descriptions of the topics that exist. All are listed, since requesting one may create it."""
    wanted = {topic.name(cluster) for topic in topics}
    return [entry for entry in await admin.describe_topics() if entry["topic"] in wanted and entry["partitions"]]


NONE = OffsetAndMetadata(-1, "")
"""The committed offset of a partition without progress."""
# The state that a coordinator reports for an unknown group, once it has read all commits.
_DEAD = "Dead"


async def committed_offsets(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return what is committed of each of `partitions`, or NONE. Raise BrokerAway while the coordinator does not
    answer.

    A coordinator that is still reading commits refuses the group as a whole, and so may one that has no such group.
    aiokafka ignores both and returns no partitions. To take that for "nothing is committed" would make all work
    begin again.
    """
    found = await admin.list_consumer_group_offsets(group, partitions=list(partitions))
    if partitions and not found and await _is_unknown(admin, group):
        return dict.fromkeys(partitions, NONE)
    if silent := [partition for partition in partitions if partition not in found]:
        raise BrokerAway(f"the coordinator of {group} does not report the offsets of {len(silent)} partitions")
    return {each: OffsetAndMetadata(found[each].offset, found[each].metadata or "") for each in partitions}


async def _is_unknown(admin: AIOKafkaAdminClient, group: str) -> bool:
    """Return whether the coordinator is certain that the group does not exist."""
    answers = await admin.describe_consumer_groups([group])
    states = [(code, state) for answer in answers for code, _name, state, *_ in answer.groups]
    return states == [(0, _DEAD)]
