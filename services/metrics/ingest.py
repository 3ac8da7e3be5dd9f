"""From the bus into the state."""

from libs.bus.port import Bus
from libs.contracts.topics import DECISIONS, REQUESTS, STEPS
from libs.runtime.clock import Clock
from services.metrics.state import MetricsState


async def ingest(bus: Bus, state: MetricsState, clock: Clock) -> None:
    """Enter every record from now on; ends with the bus."""
    async for record in bus.subscribe((STEPS, REQUESTS, DECISIONS)):
        state.take(record, clock.now_ns())
