"""The HTTP routes of the metrics service.

The binary format of windows begins with a little-endian uint32, the length of a JSON header. Spaces pad the header so
that the arrays are aligned to 8. Then follow times [windows, workers, 4] (covered, prefill, decode, KV wait) in
nanoseconds, uint32 or float64 as the header's `type` says. Roles [windows, workers] uint8 follow, with bit 7 set where
the time is provisional. If the header says `encodes`, zeros pad the message to 8, and the time of encoding images
[windows, workers], a part of prefill, ends it in the same type.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from fastapi import APIRouter, FastAPI, Query, Request, Response
from prometheus_client import CollectorRegistry

from libs.contracts.errors import InvalidRequest
from libs.keys.gate import caller_of
from libs.policy.alerts.store import AlertStore
from libs.policy.kv_links import KvLink, judge, way
from libs.runtime.clock import Clock
from libs.runtime.web import make_web_app
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.rollups import NO_ROLE, PROVISIONAL, Series, Tier
from libs.telemetry.workers import UNKNOWN, Member, Members
from services.metrics.accounting.answer import ClusterOccupancy
from services.metrics.accounting.occupancy import Efficiency, RecentOccupancy, cluster_occupancy_in_turns, efficiency
from services.metrics.accounting.queues import phase_queues
from services.metrics.accounting.series import (
    ALLOWED_SCOPES,
    TIER_NAMES,
    OccupancyHistory,
    history,
    parse_scope,
    parse_span_ns,
    parse_tier,
    parse_window_ns,
    sums,
)
from services.metrics.accounting.steps import KEPT, StepsReport, steps_of
from services.metrics.cluster_events import MAX_DECISIONS, DecisionLog, Event
from services.metrics.http.login import Page, runbook_router
from services.metrics.http.parameters import BAD_QUERY, BAD_WINDOW, End, Window, requested_end_ns
from services.metrics.http.request_routes import requests_router
from services.metrics.state import MS_NS, MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.past import TIERS, StatusRecorder
from services.metrics.status.report import status_router
from services.metrics.stream import EventStream, Hub

MAX_CELLS: Final = 200_000
"""Windows x workers in one answer: 3.4 MB of windows below 4 s, 6.6 MB of longer ones."""
ALIGNMENT_BYTES: Final = 8
_LENGTH_BYTES: Final = 4


class Header(msgspec.Struct):
    window_ms: int
    first_start_unix_ms: int
    windows: int
    workers: list[str]
    nodes: list[str]
    models: list[str]
    gpus: list[int]
    """GPUs of each worker by its last report."""
    groups: list[str]
    """Data-parallel groups of which workers are ranks; empty for a worker without one."""
    type: str
    told_to_unix_ms: int
    """The end of the newest 100 ms included. In the window that contains it, only the time before it is over."""
    encodes: bool
    """True if any of the time was spent on encoding images."""


def pack(series: Series, members: Members, written_to_ns: int) -> bytes:
    """Encode the windows; one that is not over at `written_to_ns` is provisional."""
    starts = series.starts_ns
    # JavaScript reads both types without loss; nanoseconds of a long window need 53 bits.
    small = series.window_ns < 2**32
    encode = series.encode_ns if series.encode_ns is not None and series.encode_ns.any() else None
    of = [members.get(worker_id) or Member(worker_id, UNKNOWN, UNKNOWN, 1) for worker_id in series.worker_ids]
    header = msgspec.json.encode(
        Header(
            window_ms=series.window_ns // 1_000_000,
            first_start_unix_ms=int(starts[0]) // 1_000_000 if len(starts) else 0,
            windows=len(starts),
            workers=list(series.worker_ids),
            nodes=[member.node for member in of],
            models=[member.model for member in of],
            gpus=[member.gpus for member in of],
            groups=[member.group for member in of],
            type="uint32" if small else "float64",
            told_to_unix_ms=written_to_ns // 1_000_000,
            encodes=encode is not None,
        )
    )
    header += b" " * (-(len(header) + _LENGTH_BYTES) % ALIGNMENT_BYTES)
    kind = "<u4" if small else "<f8"
    times = series.times_ns.astype(kind)
    provisional = series.provisional | (starts[:, None] + series.window_ns > written_to_ns)
    roles = series.roles | ((provisional & (series.roles != NO_ROLE)) * np.uint8(PROVISIONAL))
    parts = [len(header).to_bytes(_LENGTH_BYTES, "little"), header, times.tobytes(), roles.tobytes()]
    if encode is not None:
        parts += [b"\0" * (-roles.size % ALIGNMENT_BYTES), encode.astype(kind).tobytes()]
    return b"".join(parts)


MAX_EVENTS = 1_000
TierName = Annotated[str, Query(description=f"Length of each window: {', '.join(TIER_NAMES)}.")]
Span = Annotated[str, Query(description="Length of the span before the end, e.g. 10s, 2m or 1h.")]
ScopeText = Annotated[str, Query(description=f"Which GPUs: {ALLOWED_SCOPES}.")]
Limit = Annotated[int, Query(ge=1, le=MAX_EVENTS, description="The number of events to list, newest first.")]


class HistoryApi:
    """Routes over the roll-ups, whose newest windows end `lag_ns` before now."""

    def __init__(self, state: MetricsState, hub: Hub, clock: Clock, *, lag_ns: int) -> None:
        self._state = state
        self._hub = hub
        self._clock = clock
        self._lag_ns = lag_ns

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")
        router.get("/occupancy/history", responses=BAD_QUERY)(self.history)
        router.get("/events")(self.events)
        # OpenAPI cannot describe a binary layout or an endless answer.
        router.get("/occupancy/windows", include_in_schema=False)(self.windows)
        router.get("/occupancy/stream", include_in_schema=False)(self.stream)
        return router

    async def history(
        self, window: TierName = "1s", span: Span = "2m", scope: ScopeText = "cluster", end_unix_ms: End = None
    ) -> OccupancyHistory:
        """Return the GPU time by phase of a scope, window by window: whole GPU-nanoseconds, with their coverage."""
        wanted, tier = parse_scope(scope), parse_tier(window)
        bounds_ns = self._bounds(tier, span, end_unix_ms)
        pieces = []
        for piece in sums(self._state.members, self._state.rollups, wanted, tier, bounds_ns):
            pieces.append(piece)
            await asyncio.sleep(0)
        return history(pieces, wanted, tier.window_ns, self._covered_to_ns())

    async def windows(self, window: TierName = "100ms", span: Span = "2s", end_unix_ms: End = None) -> Response:
        """Return the windows of every worker as bytes: a JSON header, then arrays."""
        tier = parse_tier(window)
        low_ns, high_ns = self._bounds(tier, span, end_unix_ms)
        workers = len(self._state.rollups.worker_ids())
        if (high_ns - low_ns) // tier.window_ns * workers > MAX_CELLS:
            longest_ns = MAX_CELLS // workers * tier.window_ns
            raise InvalidRequest(
                f"span={span[:40]!r} is over {longest_ns / 1e9:g}s for {workers} workers", param="span"
            )
        series = self._state.rollups.read(tier.window_ns, low_ns, high_ns)
        return Response(pack(series, self._state.members, self._covered_to_ns()), media_type="application/octet-stream")

    async def events(self, limit: Limit = 100) -> list[Event]:
        """List role moves and changes of the planner's mode, the newest first."""
        return self._state.events.newest(limit)

    async def stream(self, request: Request, *, between: bool = True) -> EventStream:
        """Stream server-sent events: `members`, then a `tick` every 100 ms and at changes in between (see
        stream.py).

        Readers with `between=false` get changes with the next tick, unless other readers want them sooner.
        """
        caller = caller_of(request.scope).name
        self._hub.check_room(caller)
        return EventStream(self._hub, caller, between=between)

    def _covered_to_ns(self) -> int:
        """Return the end of the written windows."""
        return self._state.history.written_to_ns or self._clock.now_ns() - self._lag_ns

    def _bounds(self, tier: Tier, span: str, end_unix_ms: int | None) -> tuple[int, int]:
        """Return [low, high) in whole windows, the newest being the one that holds the last moment written."""
        span_ns, length_ns = parse_span_ns(span, tier), tier.window_ns
        newest_ns = min(
            self._clock.now_ns() - self._lag_ns, self._covered_to_ns()
        )  # a due window that is not written yet would read as 0
        end_ns = requested_end_ns(end_unix_ms, newest_ns)
        high_ns = max(-(-end_ns // length_ns) if length_ns > 10**8 else end_ns // length_ns, 0) * length_ns
        return max(high_ns - span_ns // length_ns * length_ns, 0), high_ns


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
        high_ns = -(-requested_end_ns(end_unix_ms, clock.now_ns()) // length_ns) * length_ns
        reported = recorder.history(length_ns, max(high_ns - span_ns // length_ns * length_ns, 0), high_ns)
        return Response(msgspec.json.encode(reported), media_type="application/json")

    return router


DecisionLimit = Annotated[
    int, Query(ge=1, le=MAX_DECISIONS, description="The number of decisions to list, newest first.")
]
Keeps = Annotated[bool, Query(description="Include the newest decision that changes no worker.")]


def decisions_router(log: DecisionLog) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/decisions")
    async def decisions(limit: DecisionLimit = 20, *, keeps: Keeps = False) -> Response:
        """List the planner's last decisions as published on the topic, the newest first."""
        return Response(msgspec.json.encode(log.newest(limit, keeps=keeps)), media_type="application/json")

    return router


@dataclass(frozen=True, slots=True)
class LinkAnswer:
    """The KV transfers from one worker to another.

    `gb_per_s` is the speed of the fastest recent transfers, or null if all were too small to measure. `is_floor` means
    that the receiver's steps may have limited that speed, so the link may be faster. `of_fastest` is the speed relative
    to the model's fastest pair that moves KV in the same way. It is null for a floor, and if no such pair exists.
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


MAX_LISTED_STEPS = 5_000
"""The maximum number of steps in one answer, 1.3 MB."""
NO_STEPS: dict[int | str, dict[str, Any]] = BAD_WINDOW | {
    404: {"description": "no such worker is known"},
    410: {"description": f"nothing of the window is known step by step. {KEPT}"},
    421: {"description": "another instance of the metrics service reads the worker, and has its steps"},
}


def steps_router(state: MetricsState, clock: Clock, *, live_lag_ns: int) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/steps", responses=NO_STEPS, response_model=StepsReport)
    async def steps(
        worker: Annotated[str, Query(description="Id of the worker.")],
        window: Window = "1s",
        end_unix_ms: End = None,
        limit: Annotated[
            int, Query(ge=1, le=MAX_LISTED_STEPS, description="The number of steps to list, oldest first.")
        ] = 1_000,
    ) -> Response:
        """List the engine steps of one worker behind its figures in a window."""
        end_ns = requested_end_ns(end_unix_ms, clock.now_ns() - live_lag_ns)
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
        end_ns, window_ns = requested_end_ns(end_unix_ms, clock.now_ns() - lag_ns), parse_window_ns(window)
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
        end_ns = requested_end_ns(end_unix_ms, clock.now_ns() - lag_ns)
        return efficiency(await recent.as_of(end_ns), parse_scope(scope))

    observed = None if verdicts is None else verdicts.observed
    report = state.requests.report if observed is None else observed.traffic.report
    app.include_router(requests_router(state.requests, clock, state.gateways.awaited, report))
    app.include_router(steps_router(state, clock, live_lag_ns=live_lag_ns))
    app.include_router(HistoryApi(state, hub, clock, lag_ns=live_lag_ns).router())
    if verdicts is not None:
        app.include_router(status_router(state, verdicts, book, clock))
    app.include_router(decisions_router(state.decision_log))
    app.include_router(links_router(state.fleet, clock))
    app.include_router(past_status_router(recorder or StatusRecorder(), clock))
    app.include_router(runbook_router())
    for router in more:
        app.include_router(router)
    app.mount("/", Page())  # last, because it matches every remaining path
    return app
