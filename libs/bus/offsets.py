"""How far the work of a group is, as its coordinator knows it."""

from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from libs.bus.servers import BrokerAway

NONE = OffsetAndMetadata(-1, "")
"""What is committed of a partition that nobody has worked on."""


async def committed_offsets(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Of each of `partitions`, NONE included; raises BrokerAway while the coordinator does not tell.

    A coordinator that is still reading what was committed refuses the group as a whole. aiokafka overlooks that, and
    has an answer without partitions: taken for "nothing is committed", all work would begin again.
    """
    found = await admin.list_consumer_group_offsets(group, partitions=list(partitions))
    if silent := [partition for partition in partitions if partition not in found]:
        raise BrokerAway(f"the coordinator of {group} does not tell how far {len(silent)} partitions are")
    return {each: OffsetAndMetadata(found[each].offset, found[each].metadata or "") for each in partitions}
