"""Committed offsets of a group, as its coordinator reports them."""

from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from libs.bus.clients import BrokerAway

NONE = OffsetAndMetadata(-1, "")
"""The committed offset of a partition that nobody has worked on."""
# The state that a coordinator reports for a group it does not have, once it has read everything committed.
_DEAD = "Dead"


async def committed_offsets(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return what is committed of each of `partitions`, or NONE. Raises BrokerAway while the coordinator does not
    answer.

    A coordinator that is still reading commits refuses the group as a whole, and so may one that has no such group.
    aiokafka ignores both and returns no partitions. To take that for "nothing is committed" would make all work
    begin again.
    """
    found = await admin.list_consumer_group_offsets(group, partitions=list(partitions))
    if partitions and not found and await _is_unknown(admin, group):
        return dict.fromkeys(partitions, NONE)
    if silent := [partition for partition in partitions if partition not in found]:
        raise BrokerAway(f"the coordinator of {group} does not tell how far {len(silent)} partitions are")
    return {each: OffsetAndMetadata(found[each].offset, found[each].metadata or "") for each in partitions}


async def _is_unknown(admin: AIOKafkaAdminClient, group: str) -> bool:
    """Return whether the coordinator is certain that the group does not exist."""
    answers = await admin.describe_consumer_groups([group])
    states = [(code, state) for answer in answers for code, _name, state, *_ in answer.groups]
    return states == [(0, _DEAD)]
