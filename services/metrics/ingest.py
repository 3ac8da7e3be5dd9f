"""From the bus into what the service knows."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from libs.bus.port import TAKEN_OVER_NS, Gap, LiveBus, Record
from libs.contracts.topics import DECISIONS, DEMAND, QUEUES, REQUESTS, STEPS, WINDOWS, Topic
from libs.policy.metrics.shares import Shares
from libs.runtime.clock import Clock

RECORDS_A_TURN: Final = 100
"""2 to 3 ms."""
Take = Callable[[Record, int], None]
"""Enters a record that came at a moment in Unix ns."""


def read_from_ns(kept_from_ns: int | None, now_ns: int, *, shared: bool) -> int:
    """Since when a service reads that starts now: where its kept history says, else from its start, however long it
    takes until it has found the ends of its topics; one that shares from before that, since its partitions may have had
    no reader."""
    if kept_from_ns is not None:
        return kept_from_ns
    return now_ns - TAKEN_OVER_NS if shared else now_ns


async def ingest(
    bus: LiveBus,
    takers: Sequence[Take],
    clock: Clock,
    *,
    on_gap: Callable[[Gap], None],
    since_unix_ns: int | None = None,
    shares: Shares | None = None,
    gather_ms: Callable[[], int] | None = None,
) -> None:
    """Give every record from now on, or since a moment, to each taker; ends with the bus. With `shares` step telemetry
    is read of the partitions that are this instance's, and what others send of theirs. Step telemetry that is read too
    late is jumped over, and `on_gap` called. `gather_ms`: as `LiveBus` takes it."""

    def wanted(topic: Topic, partition: int) -> bool:
        return shares is None or topic is not STEPS or shares.mine(partition, clock.now_ns())

    topics = (STEPS, QUEUES, REQUESTS, DECISIONS, DEMAND, *(() if shares is None else (WINDOWS,)))
    taken = 0
    records = bus.subscribe_live(
        topics, jumping=(STEPS,), on_gap=on_gap, since_unix_ns=since_unix_ns, wanted=wanted, gather_ms=gather_ms
    )
    async for record in records:
        taken += 1
        if taken % RECORDS_A_TURN == 0:  # many come at a time, and ticks and readers wait meanwhile
            await asyncio.sleep(0)
        now_ns = clock.now_ns()
        for take in takers:
            take(record, now_ns)
