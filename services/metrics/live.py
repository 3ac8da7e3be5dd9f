"""The live task: it writes history, evaluates alerts and sends ticks to readers.

New windows are sent every 100 ms. Changes in windows sent before go out more often, as long as readers want them.
"""

import asyncio
from typing import Final

from libs.policy.alerts.store import Alert
from libs.runtime.clock import Clock
from services.metrics.accounting.queues import phase_queues
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.loads import LoadPublisher
from services.metrics.state import MS_NS, MetricsState, age_ns
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.stream import Hub, TickWriter

TICK_NS: Final = 100_000_000
"""The window that a tick sends for the first time, for every worker."""
UNREAD_NS: Final = 400_000_000
"""The interval at which windows are written while nobody reads them live. Four at a time cost little more than one,
and less late telemetry has to be entered again.
"""
ROUND_NS: Final = 25_000_000
"""The interval at which changes are sent, for the workers that changed. Telemetry arrives at any moment between two
ticks and mostly extends a window that was sent. It then waits for a round, not for the next tick.
"""
TIMER_NS: Final = 1_000_000
"""Accuracy of the event loop's timers; a timer that fired early would be waited for twice."""
REPLAY_NS: Final = 5_000_000_000
"""The longest time that a service with restored history waits for the broker's backlog."""
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
    """Write each window `lag_ns` after its end, and revise those before it.

    Revisions come every `ROUND_NS` while a reader wants them. Otherwise they come with the next window, or with
    four windows while nobody reads the stream and nothing runs. A late round writes what it has missed.

    With restored history the first round waits for telemetry nearly as recent as this call. Windows written earlier
    would all have to be written again.
    """
    started_ns = clock.now_ns()
    replayed = state.history.written_to_ns is None
    alerts: list[Alert] = []
    shown_number = -1
    while True:
        # Read by pages, by other instances, or by planners with something to decide.
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
            await asyncio.sleep(0)  # readers get the tick first, as evaluating alerts takes as long
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
    """Run one round; `alerts` have changed since the last one.

    Without `whole` it sends only what has changed, if anything has and readers have all workers concerned.
    """
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
