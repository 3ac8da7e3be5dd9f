"""The owned task that writes history, looks for alerts and tells readers: of new windows every 100 ms, and more often,
as long as there are readers who want it, what has changed in the windows sent before."""

import asyncio
from typing import Final

from libs.policy.alerts.store import Alert
from libs.runtime.clock import Clock
from services.metrics.accounting.queues import phase_queues
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.loads import LoadPublisher
from services.metrics.state import MS_NS, MetricsState, age_ns
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.stream.hub import Hub
from services.metrics.stream.ticks import TickWriter

TICK_NS: Final = 100_000_000
"""A window: what one tick sends for the first time, of every worker."""
UNREAD_NS: Final = 400_000_000
"""How often windows are written that nobody reads as they come: four at a time cost little more than one, and less of
what comes late is entered anew."""
ROUND_NS: Final = 25_000_000
"""How often changes are sent, of the workers that changed. A worker's telemetry comes at any moment between two ticks
and mostly adds to a window that was sent: it waits for a round, and no longer for the next tick."""
TIMER_NS: Final = 1_000_000
"""The loop's timers are as exact: one that came too early would have to be waited for twice."""
REPLAY_NS: Final = 5_000_000_000
"""How long a service that goes on with kept history waits at most for what the broker held meanwhile."""
YOUNG_NS: Final = 1_000_000_000


async def tick_forever(
    state: MetricsState,
    hub: Hub,
    writer: TickWriter,
    desk: AlertEvaluator,
    clock: Clock,
    *,
    lag_ns: int,
    loads: LoadPublisher | None = None,
    verdicts: VerdictEvaluator | None = None,
) -> None:
    """Write each window `lag_ns` after its end, and what has changed in those before: every `ROUND_NS` while anybody
    wants it so soon, else with the next window, or with four of them while nobody reads the stream and nothing works. A
    late round writes what it has missed.

    With kept history the first round waits until telemetry has come that is nearly as young as this call: windows
    written before it would all be written again.
    """
    started_ns = clock.now_ns()
    replayed = state.history.written_to_ns is None
    alerts: list[Alert] = []
    shown_number = -1
    while True:
        # By pages, by other instances, or by planners that have something to decide.
        read = hub.readers or state.sharing is not None or (loads is not None and loads.works)
        round_ns = ROUND_NS if hub.close_readers else TICK_NS if read else UNREAD_NS
        await asyncio.sleep((round_ns - (clock.now_ns() - lag_ns) % round_ns + TIMER_NS) / 1e9)
        now_ns = clock.now_ns()
        covered_to_ns = state.fleet.directory.newest_cover_ns
        replayed = replayed or covered_to_ns >= started_ns - YOUNG_NS or now_ns > started_ns + REPLAY_NS
        if replayed:
            number = (now_ns - lag_ns) // TICK_NS
            tick(state, hub, writer, alerts, now_ns, lag_ns=lag_ns, whole=number != shown_number, loads=loads)
            shown_number = number
            await asyncio.sleep(0)  # readers get it first: a look for alerts takes as long as a tick
            alerts = await desk.look(now_ns)
            if verdicts is not None:
                await verdicts.look(now_ns)


def tick(
    state: MetricsState,
    hub: Hub,
    writer: TickWriter,
    alerts: list[Alert],
    now_ns: int,
    *,
    lag_ns: int,
    whole: bool = True,
    loads: LoadPublisher | None = None,
) -> None:
    """One round. `alerts` have changed since the last one. Where it need not be `whole` it sends what has changed, if
    anything has, as long as readers know the workers it belongs to."""
    written = state.history.advance(now_ns - lag_ns)
    if loads is not None:
        loads.keep(written)
        if whole:
            loads.tell(state.fleet, now_ns)
    if state.sharing is not None:
        state.sharing.keep(written)
        if whole:
            state.sharing.send(state.fleet, state.rollups, now_ns)
        written = state.sharing.take_heard(state.fleet, state.rollups, now_ns) + written
    if not whole and writer.knows(written):
        if alerts or any(window.workers for window in written):
            hub.publish(writer.changes(now_ns, written, alerts))
        return
    loads_now = state.fleet.directory.loads(now_ns)
    members = writer.members(loads_now.listing)
    queues = phase_queues(loads_now, state.fleet.clocks, state.gateways, now_ns)
    aged_ns = age_ns(loads_now, state.history.written_to_ns, now_ns)
    age_ms = None if aged_ns is None else aged_ns // MS_NS
    state.look_at_workers(now_ns)
    events = state.unsent_events()
    hub.publish(writer.tick(now_ns, written, loads_now, events, alerts, queues=queues, age_ms=age_ms), members)
