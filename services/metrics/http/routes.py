from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Query, Response
from prometheus_client import CollectorRegistry

from libs.contracts.errors import InvalidRequest
from libs.policy.alerts.store import AlertStore
from libs.policy.metrics.kv_links import KvLink, judge, way
from libs.runtime.clock import Clock
from libs.runtime.web import make_web_app
from libs.telemetry.fleet import FleetTelemetry
from services.metrics.accounting.answer import ClusterOccupancy
from services.metrics.accounting.efficiency import Efficiency, RecentOccupancy, efficiency
from services.metrics.accounting.occupancy import cluster_occupancy_in_turns
from services.metrics.accounting.queues import phase_queues
from services.metrics.accounting.scope import parse_scope
from services.metrics.accounting.steps import KEPT, StepsReport, steps_of
from services.metrics.accounting.window import ALLOWED, TIER_NAMES, parse_span_ns, parse_tier, parse_window_ns
from services.metrics.cluster_events.decisions import MAX_DECISIONS, DecisionLog
from services.metrics.http.history import BAD_QUERY, End, HistoryApi, ScopeText, Span, asked_end_ns
from services.metrics.http.static import Page, runbook_router
from services.metrics.past_status import TIERS, StatusRecorder
from services.metrics.requests.wire import FinishedRequest, RequestsReport
from services.metrics.state import MS_NS, MetricsState
from services.metrics.status.api import status_router
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.stream import Hub

LENGTHS = [name for name, tier in TIER_NAMES.items() if tier in TIERS]
StatusWindow = Annotated[str, Query(description=f"Length of each window: {', '.join(LENGTHS)}.")]


def past_status_router(recorder: StatusRecorder, clock: Clock) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/status/history", responses=BAD_QUERY)
    async def status_history(window: StatusWindow = "1s", span: Span = "2m", end_unix_ms: End = None) -> Response:
        """Return each model's pressure, the traffic and the verdicts, window by window; null where nothing is known."""
        tier = parse_tier(window)
        if tier not in TIERS:
            raise InvalidRequest(f"window={window[:40]!r} is not one of {', '.join(LENGTHS)}", param="window")
        length_ns, span_ns = tier.window_ns, parse_span_ns(span, tier)
        high_ns = -(-asked_end_ns(end_unix_ms, clock.now_ns()) // length_ns) * length_ns
        reported = recorder.history(length_ns, max(high_ns - span_ns // length_ns * length_ns, 0), high_ns)
        return Response(msgspec.json.encode(reported), media_type="application/json")

    return router


DecisionLimit = Annotated[int, Query(ge=1, le=MAX_DECISIONS, description="How many, the newest first.")]
Keeps = Annotated[bool, Query(description="The newest too that leaves all workers as they are.")]


def decisions_router(log: DecisionLog) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/decisions")
    async def decisions(limit: DecisionLimit = 20, *, keeps: Keeps = False) -> Response:
        """List the planner's last decisions as the topic carries them, the newest first."""
        return Response(msgspec.json.encode(log.newest(limit, keeps=keeps)), media_type="application/json")

    return router


@dataclass(frozen=True, slots=True)
class LinkAnswer:
    """KV transfers from one worker to another.

    `gb_per_s` is the speed of the fastest recent transfers, null where all were too small to measure. `is_floor`
    means that the receiver's steps may have limited that speed, so the link may be faster. `of_fastest` is the
    share of the model's fastest pair that moves KV in the same way. It is null for a floor, and where there is
    nothing to compare with.
    """

    source: str
    target: str
    model: str
    way: str
    transfers: int
    bytes: int
    gb_per_s: float | None
    is_floor: bool
    of_fastest: float | None


def links_router(fleet: FleetTelemetry, clock: Clock) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/links", response_model=list[LinkAnswer])
    async def links() -> Response:
        """List the KV speed of each pair of workers, the slowest first, for receivers whose telemetry this instance
        reads.
        """
        return Response(msgspec.json.encode(_links(fleet.kv_links(clock.now_ns()))), media_type="application/json")

    return router


def _links(links: Sequence[KvLink]) -> list[LinkAnswer]:
    shares = {each.link: each.share for each in judge(links)}
    found = [
        LinkAnswer(
            each.source,
            each.target,
            each.model,
            way(shared_memory=each.shared_memory),
            each.transfers,
            each.total_bytes,
            each.gb_per_s,
            each.is_floor,
            shares.get(each),
        )
        for each in links
    ]
    return sorted(found, key=lambda each: (each.gb_per_s is None, each.gb_per_s or 0.0))


Window = Annotated[str, Query(description=f"How far to look back: {ALLOWED}.")]
MAX_REQUESTS_TOLD = 1_000
MAX_STEPS_TOLD = 5_000
"""The most steps in one answer, 1.3 MB."""
BAD_WINDOW: dict[int | str, dict[str, Any]] = {
    400: {"description": "the window is not one; the error names what is allowed"}
}
NO_STEPS: dict[int | str, dict[str, Any]] = BAD_WINDOW | {
    404: {"description": "no such worker has been heard of"},
    410: {"description": f"nothing of the window is known step by step. {KEPT}"},
    421: {"description": "another instance of the metrics service reads the worker, and has its steps"},
}


def requests_router(state: MetricsState, clock: Clock, *, live_lag_ns: int) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/requests/summary", responses=BAD_WINDOW)
    async def requests_summary(window: Window = "1m", end_unix_ms: End = None) -> RequestsReport:
        """Summarise requests that ended in the window: counts, TTFT and TPOT percentiles in seconds, in total and by
        model.
        """
        return state.requests.report(asked_end_ns(end_unix_ms, clock.now_ns()), parse_window_ns(window))

    @router.get("/requests")
    async def requests_of(
        worker: Annotated[str, Query(description="Id of a worker that computed their prompt or their tokens.")],
        limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS_TOLD, description="How many, the newest first.")] = 50,
    ) -> list[FinishedRequest]:
        """List the last finished requests of a worker, as far as they are kept."""
        return state.requests.of_worker(worker, limit)

    @router.get("/steps", responses=NO_STEPS, response_model=StepsReport)
    async def steps(
        worker: Annotated[str, Query(description="Id of the worker.")],
        window: Window = "1s",
        end_unix_ms: End = None,
        limit: Annotated[int, Query(ge=1, le=MAX_STEPS_TOLD, description="How many, the oldest first.")] = 1_000,
    ) -> Response:
        """List the engine steps of one worker behind its figures in a window."""
        end_ns = asked_end_ns(end_unix_ms, clock.now_ns() - live_lag_ns)
        report = steps_of(state.fleet, worker, end_ns, parse_window_ns(window), limit)
        return Response(msgspec.json.encode(report), media_type="application/json")

    return router


def make_api(
    state: MetricsState,
    hub: Hub,
    book: AlertStore,
    clock: Clock,
    registry: CollectorRegistry,
    *,
    lag_ns: int,
    live_lag_ns: int,
    verdicts: VerdictEvaluator | None = None,
    recorder: StatusRecorder | None = None,
    more: Iterable[APIRouter] = (),
) -> FastAPI:
    """Build the app over `state`.

    Windows end `lag_ns` before now, once their telemetry has arrived. Those of history and stream end `live_lag_ns`
    before now, and are revised.
    """
    app = make_web_app(
        "Fulcrum metrics",
        "True GPU time by phase, from step telemetry.",
        not_ready=lambda: state.not_live(clock.now_ns()),
        metrics=registry,
    )

    @app.get("/v1/occupancy", responses=BAD_WINDOW, response_model=ClusterOccupancy)
    async def occupancy(window: Window = "2s", end_unix_ms: End = None) -> Response:
        """Return GPU time by phase of each worker, each model and the cluster, as fractions of covered time."""
        end_ns, window_ns = asked_end_ns(end_unix_ms, clock.now_ns() - lag_ns), parse_window_ns(window)
        now_ns = clock.now_ns()
        live = end_unix_ms is None  # past queues are not stored
        fleet = state.fleet
        queues = phase_queues(fleet.directory.loads(now_ns), fleet.clocks, state.gateways, now_ns) if live else []
        aged_ns = state.age_ns(now_ns) if live else None
        age_ms = None if aged_ns is None else aged_ns // MS_NS
        report = await cluster_occupancy_in_turns(
            fleet, state.rollups, state.members, end_ns, window_ns, queues=queues, age_ms=age_ms
        )
        # FastAPI would validate each of a thousand workers again, which takes 0.2 s.
        return Response(msgspec.json.encode(report), media_type="application/json")

    recent = RecentOccupancy(state.fleet, state.rollups, state.members)

    @app.get("/v1/occupancy/efficiency", responses=BAD_WINDOW)
    async def efficiency_of(scope: ScopeText = "cluster", end_unix_ms: End = None) -> Efficiency:
        """Return MFU and MBU by phase, hardware counters and clock offsets of a scope over two seconds."""
        end_ns = asked_end_ns(end_unix_ms, clock.now_ns() - lag_ns)
        return efficiency(await recent.as_of(end_ns), parse_scope(scope))

    app.include_router(requests_router(state, clock, live_lag_ns=live_lag_ns))
    app.include_router(HistoryApi(state, hub, clock, lag_ns=live_lag_ns).router())
    if verdicts is not None:
        app.include_router(status_router(state, verdicts, book, clock))
    app.include_router(decisions_router(state.decision_log))
    app.include_router(links_router(state.fleet, clock))
    app.include_router(past_status_router(recorder or StatusRecorder(), clock))
    app.include_router(runbook_router())
    for router in more:
        app.include_router(router)
    app.mount("/", Page())  # last, as it matches every remaining path
    return app
