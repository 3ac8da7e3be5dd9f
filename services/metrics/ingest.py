"""The reader of the bus, which hands every record to the service's takers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from libs.bus.port import TAKEN_OVER_NS, Gap, LiveBus, Record
from libs.contracts.topics import DECISIONS, DEMAND, QUEUES, REQUESTS, STEPS, WINDOWS, Topic
from libs.policy.metrics.shares import Shares
from libs.runtime.clock import Clock

RECORDS_A_TURN: Final = 100
"""Records between two turns of the event loop, 2 to 3 ms."""
Take = Callable[[Record, int], None]
"""A function that records a value of the bus received at a Unix ns."""


def read_from_ns(kept_from_ns: int | None, now_ns: int, *, shared: bool) -> int:
    """Return the time from which a service that starts now reads.

    Kept history decides it, else the service's start, however long finding the ends of its topics takes. A service
    that shares reads from before its start, since its partitions may have had no reader.
    """
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
    """Hand every record from now on, or since a time, to each taker; ends with the bus.

    With `shares`, step telemetry is read from this instance's partitions only, beside what other instances publish.
    Step telemetry that is read too late is skipped, and `on_gap` called. `gather_ms` is that of `LiveBus`.
    """

    def wanted(topic: Topic, partition: int) -> bool:
        return shares is None or topic is not STEPS or shares.mine(partition, clock.now_ns())

    topics = (STEPS, QUEUES, REQUESTS, DECISIONS, DEMAND, *(() if shares is None else (WINDOWS,)))
    taken = 0
    records = bus.subscribe_live(
        topics, jumping=(STEPS,), on_gap=on_gap, since_unix_ns=since_unix_ns, wanted=wanted, gather_ms=gather_ms
    )
    async for record in records:
        taken += 1
        if taken % RECORDS_A_TURN == 0:  # ticks and readers get a turn during a burst
            await asyncio.sleep(0)
        now_ns = clock.now_ns()
        for take in takers:
            take(record, now_ns)
