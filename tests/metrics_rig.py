"""The metrics service's own app, ticks and stream over a state that a test feeds."""

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from libs.policy.verdict.state import VerdictLimits
from libs.runtime.clock import Clock
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.testing.workers.hosts import RecordingBus
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.run import open_alerts
from services.metrics.http.login import AccessControl
from services.metrics.http.routes import make_api
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.past import StatusRecorder, record_status
from services.metrics.status.report import measured_status
from services.metrics.stream import TICK_NS, Hub, TickWriter, tick_forever

MS_NS: Final = 1_000_000
LAG_NS: Final = 4 * TICK_NS
LIVE_LAG_NS: Final = TICK_NS
"""Workers of these tests send each full 100 ms slightly later, so that windows are complete when reported."""


@asynccontextmanager
async def serving_metrics(
    state: MetricsState,
    clock: Clock,
    hub: Hub,
    sending: Coroutine[Any, Any, None],
    *,
    settings: MetricsSettings,
    port: int = 0,
    more: Sequence[APIRouter] = (),
) -> AsyncIterator[str]:
    """Yield the service's address; `sending`, which feeds the state, runs for as long. Nothing of it may fail."""
    tasks = TaskOwner()
    writer = TickWriter(window_ns=TICK_NS, settled_ns=LAG_NS)
    desk = AlertEvaluator(state, settings.alert_limits(), lag_ns=LIVE_LAG_NS)
    verdicts = VerdictEvaluator(
        state, VerdictLimits(), ttft_limit_ns=5_000 * MS_NS, tpot_ns=100 * MS_NS, lag_ns=LIVE_LAG_NS
    )
    recorder = StatusRecorder()
    door = AccessControl(None, settings, clock, token=settings.token.get_secret_value())
    alerts = open_alerts(settings, RecordingBus(), desk, clock, began_ns=0, make_client=None, guard=door.guard)
    api = make_api(
        state, hub, desk.book, clock, CollectorRegistry(), lag_ns=LAG_NS, live_lag_ns=LIVE_LAG_NS, verdicts=verdicts,
        recorder=recorder, more=(alerts.router, *more),
    )  # fmt: skip
    try:
        tasks.spawn("workers", sending)
        tasks.spawn("past status", record_status(recorder, partial(measured_status, state, verdicts, desk.book), clock))
        tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=LIVE_LAG_NS, verdicts=verdicts))
        async with serve_http(api, bind("127.0.0.1", port, "PORT"), tasks=tasks) as url:
            try:
                yield url
            finally:
                hub.close()
    finally:
        await tasks.close()
    assert tasks.error is None
