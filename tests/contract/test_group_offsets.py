"""Tests of a consumer group's committed offsets as its coordinator reports them."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError, GroupLoadInProgressError
from aiokafka.protocol.admin import DescribeGroupsRequest, DescribeGroupsResponse_v0
from aiokafka.protocol.commit import OffsetFetchResponse_v3

from libs.bus.broker import NONE, committed_offsets
from libs.bus.clients import BrokerAway, open_admin
from libs.testing.servers.stores import KafkaServer

SETTLE_S = 40.0


class _Starting(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka has no types
    """The answer of a broker whose coordinator is still reading commits, as Apache Kafka 4.1 gives it."""

    async def find_coordinator(self, group_id: str, coordinator_type: int = 0) -> int:
        return 0

    async def _send_request(self, request: object, node_id: int | None = None) -> Any:
        code = GroupLoadInProgressError.errno
        if isinstance(request, DescribeGroupsRequest):
            return DescribeGroupsResponse_v0(groups=[(code, "a-group", "", "", "", [])])
        return OffsetFetchResponse_v3(throttle_time_ms=0, topics=[], error_code=code)


async def test_a_coordinator_that_is_starting_is_not_mistaken_for_one_without_offsets(kafka: KafkaServer) -> None:
    one = TopicPartition("any", 0)
    async with open_admin(kafka.servers, "asks") as admin, asyncio.timeout(SETTLE_S):
        found: dict[TopicPartition, int] = {}
        while not found:  # a broker creates its coordinator on the first request
            with suppress(GroupCoordinatorNotAvailableError, BrokerAway):
                found = await committed_offsets(admin, "nobody-yet", [one])
        assert found == {one: NONE}
    with pytest.raises(BrokerAway, match="does not report"):
        await committed_offsets(_Starting(), "a-group", [one])
