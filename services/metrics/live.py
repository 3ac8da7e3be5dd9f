"""The owned task that writes history, looks for alerts and tells readers, every 100 ms."""

import asyncio
from typing import Final

from libs.runtime.clock import Clock
from services.metrics.alerts.desk import AlertDesk
from services.metrics.hub import Hub
from services.metrics.state import MetricsState
from services.metrics.ticks import TickWriter

TICK_NS: Final = 100_000_000


REPLAY_NS: Final = 5_000_000_000
"""How long a service that goes on with kept history waits at most for what the broker held meanwhile."""
YOUNG_NS: Final = 1_000_000_000


async def tick_forever(
    state: MetricsState, hub: Hub, writer: TickWriter, desk: AlertDesk, clock: Clock, *, lag_ns: int
) -> None:
    """Write each window `lag_ns` after its end. A late round writes what it has missed.

    With kept history the first round waits until telemetry has come that is nearly as young as this call: windows
    written before it would all be written again.
    """
    started_ns = clock.now_ns()
    replayed = state.history.written_to_ns is None
    while True:
        await asyncio.sleep((TICK_NS - (clock.now_ns() - lag_ns) % TICK_NS) / 1e9)
        now_ns = clock.now_ns()
        replayed = replayed or state.fleet.newest_cover_ns >= started_ns - YOUNG_NS or now_ns > started_ns + REPLAY_NS
        if replayed:
            tick(state, hub, writer, desk, now_ns, lag_ns=lag_ns)


def tick(state: MetricsState, hub: Hub, writer: TickWriter, desk: AlertDesk, now_ns: int, *, lag_ns: int) -> None:
    """One round."""
    written = state.history.advance(now_ns - lag_ns)
    if state.sharing is not None:
        state.sharing.tell(written, state.fleet, state.rollups, now_ns)
        written = state.sharing.take_heard(state.fleet, state.rollups, now_ns) + written
    listed = list(state.fleet.listed(now_ns))
    members = writer.members(listed)
    hub.publish(writer.tick(now_ns, written, listed, state.untold_events(), desk.look(now_ns)), members)
