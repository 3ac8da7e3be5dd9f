"""The metrics service's own app, tick and stream over a state that a test feeds."""

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from prometheus_client import CollectorRegistry

from libs.runtime.clock import Clock
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from services.metrics.alerts.desk import AlertDesk
from services.metrics.api import make_api
from services.metrics.hub import Hub
from services.metrics.live import TICK_NS, tick_forever
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.ticks import TickWriter

LAG_NS: Final = 4 * TICK_NS
LIVE_LAG_NS: Final = TICK_NS
"""Workers of these tests send each full 100 ms and a little later: their windows are whole when they are told."""


@asynccontextmanager
async def serving_metrics(
    state: MetricsState,
    clock: Clock,
    hub: Hub,
    sending: Coroutine[Any, Any, None],
    *,
    settings: MetricsSettings,
    port: int = 0,
) -> AsyncIterator[str]:
    """The service's address; `sending`, which feeds the state, runs for as long. Nothing of it may fail."""
    tasks = TaskOwner()
    writer = TickWriter(window_ns=TICK_NS, settled_ns=LAG_NS)
    desk = AlertDesk(state, settings.alert_limits(), lag_ns=LIVE_LAG_NS)
    api = make_api(state, hub, desk.book, clock, CollectorRegistry(), lag_ns=LAG_NS, live_lag_ns=LIVE_LAG_NS)
    try:
        tasks.spawn("workers", sending)
        tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=LIVE_LAG_NS))
        async with serve_http(api, bind("127.0.0.1", port, "PORT"), tasks=tasks) as url:
            try:
                yield url
            finally:
                hub.close()
    finally:
        await tasks.close()
    assert tasks.error is None
