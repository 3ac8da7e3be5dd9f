"""Tests of when a lane takes records that do not arrive for a lost broker."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from libs.bus.clients import BrokerAway
from libs.bus.codec import SkippedRecords
from libs.bus.lanes import STALL_POLLS, KafkaLane
from libs.contracts.topics import BATCH_JOBS

PART = TopicPartition("jobs", 0)
END = 1000


class Consumer:
    """A consumer whose polls pass records of a partition that ends at END."""

    def __init__(self, *, passes: int, returns: bool) -> None:
        """Pass `passes` records at each poll, and return them if `returns`."""
        self._passes = passes
        self._returns = returns
        self.at = 0

    async def getmany(self, *_: Any, **__: Any) -> dict[TopicPartition, list[Any]]:
        offsets = range(self.at, min(self.at + self._passes, END))
        self.at += len(offsets)
        foreign = [SimpleNamespace(offset=at, value=b"x", headers=(), partition=0) for at in offsets]
        return {PART: foreign} if self._returns and foreign else {}

    async def position(self, _: TopicPartition) -> int:
        return self.at

    async def end_offsets(self, _: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {PART: END}


async def read(consumer: Consumer) -> None:
    """Read for several times as many polls as a stall takes."""
    lane = KafkaLane(
        topic=BATCH_JOBS,
        partition=PART,
        consumer=cast("Any", consumer),
        transactions=cast("Any", SimpleNamespace(committed=OffsetAndMetadata(0, ""))),
        end=0,
        skipped=SkippedRecords(),
    )
    polls = 0
    async for batch in lane.batches():
        assert batch == []
        polls += 1
        if polls == 5 * STALL_POLLS:
            return


@pytest.mark.parametrize("returns", [True, False], ids=["foreign records", "aborted transactions"])
async def test_a_lane_that_advances_without_records_of_its_own_goes_on(returns: bool) -> None:
    consumer = Consumer(passes=1, returns=returns)
    await read(consumer)
    assert consumer.at == 5 * STALL_POLLS


async def test_a_lane_whose_records_do_not_arrive_gives_the_broker_up() -> None:
    with pytest.raises(BrokerAway):
        await read(Consumer(passes=0, returns=False))
