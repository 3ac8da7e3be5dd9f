"""How far the work of a group is, as its coordinator knows it."""

from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from libs.bus.clients import BrokerAway

NONE = OffsetAndMetadata(-1, "")
"""What is committed of a partition that nobody has worked on."""
_DEAD = "Dead"
"""The state of a group that a coordinator does not have, as it says when it has read all that was committed."""


async def committed_offsets(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """What is committed of each of `partitions`, or NONE; raises BrokerAway while the coordinator does not tell.

    A coordinator that is still reading what was committed refuses the group as a whole, and so may one that has no such
    group. aiokafka overlooks both, and has an answer without partitions: taken for "nothing is committed" from the
    first, all work would begin again.
    """
    found = await admin.list_consumer_group_offsets(group, partitions=list(partitions))
    if partitions and not found and await _is_unknown(admin, group):
        return dict.fromkeys(partitions, NONE)
    if silent := [partition for partition in partitions if partition not in found]:
        raise BrokerAway(f"the coordinator of {group} does not tell how far {len(silent)} partitions are")
    return {each: OffsetAndMetadata(found[each].offset, found[each].metadata or "") for each in partitions}


async def _is_unknown(admin: AIOKafkaAdminClient, group: str) -> bool:
    """Whether the coordinator is sure that there is no such group."""
    answers = await admin.describe_consumer_groups([group])
    states = [(code, state) for answer in answers for code, _name, state, *_ in answer.groups]
    return states == [(0, _DEAD)]
