"""From the bus into what the service knows."""

from collections.abc import Callable, Sequence

from libs.bus.port import Bus, Record
from libs.contracts.topics import DECISIONS, REQUESTS, STEPS
from libs.runtime.clock import Clock

Take = Callable[[Record, int], None]
"""Enters a record that came at a moment in Unix ns."""


async def ingest(bus: Bus, takers: Sequence[Take], clock: Clock, *, since_unix_ns: int | None = None) -> None:
    """Give every record from now on, or since a moment, to each taker; ends with the bus."""
    async for record in bus.subscribe((STEPS, REQUESTS, DECISIONS), since_unix_ns=since_unix_ns):
        now_ns = clock.now_ns()
        for take in takers:
            take(record, now_ns)
