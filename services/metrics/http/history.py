"""Routes of history by scope, windows of all workers as bytes, events and the live stream.

The binary format of windows begins with a little-endian uint32, the length of a JSON header. Spaces pad the header so
that the arrays are aligned to 8. Then follow times [windows, workers, 4] (covered, prefill, decode, KV wait) in
nanoseconds, uint32 or float64 as the header's `type` says. Roles [windows, workers] uint8 end the message, with bit 7
set where the time is provisional.
"""

import asyncio
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from fastapi import APIRouter, Query, Request, Response

from libs.contracts.errors import InvalidRequest
from libs.keys.gate import caller_of
from libs.runtime.clock import Clock
from libs.telemetry.rollups import NO_ROLE, PROVISIONAL, Series, Tier
from libs.telemetry.workers import UNKNOWN, Member, Members
from services.metrics.accounting.scope import ALLOWED, parse_scope
from services.metrics.accounting.series import OccupancyHistory, history, sums
from services.metrics.accounting.window import TIER_NAMES, parse_span_ns, parse_tier
from services.metrics.cluster_events.events import Event
from services.metrics.state import MetricsState
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
    """End of the newest 100 ms included. Of the window that holds it, only the time before it is over."""


def pack(series: Series, members: Members, written_to_ns: int) -> bytes:
    """Encode the windows; one that is not over at `written_to_ns` is provisional."""
    starts = series.starts_ns
    # JavaScript reads both types without loss; nanoseconds of a long window need 53 bits.
    small = series.window_ns < 2**32
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
        )
    )
    header += b" " * (-(len(header) + _LENGTH_BYTES) % ALIGNMENT_BYTES)
    times = series.times_ns.astype("<u4" if small else "<f8")
    provisional = series.provisional | (starts[:, None] + series.window_ns > written_to_ns)
    roles = series.roles | ((provisional & (series.roles != NO_ROLE)) * np.uint8(PROVISIONAL))
    return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, times.tobytes(), roles.tobytes()))


MAX_EVENTS = 1_000
MS_NS = 1_000_000
MAX_UNIX_MS = 2**53 - 1
Window = Annotated[str, Query(description=f"Length of each window: {', '.join(TIER_NAMES)}.")]
Span = Annotated[str, Query(description="How far back from the end, e.g. 10s, 2m or 1h.")]
ScopeText = Annotated[str, Query(description=f"Which GPUs: {ALLOWED}.")]
End = Annotated[int | None, Query(ge=0, le=MAX_UNIX_MS, description="Unix ms at which it ends; now by default.")]
Limit = Annotated[int, Query(ge=1, le=MAX_EVENTS, description="How many events, the newest first.")]
BAD_QUERY: dict[int | str, dict[str, Any]] = {400: {"description": "the error names what is allowed"}}


def asked_end_ns(end_unix_ms: int | None, newest_ns: int) -> int:
    """Return the requested end, at most the newest data; without a request, the newest."""
    return newest_ns if end_unix_ms is None else min(end_unix_ms * MS_NS, newest_ns)


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
        # OpenAPI cannot describe a binary layout and an endless answer.
        router.get("/occupancy/windows", include_in_schema=False)(self.windows)
        router.get("/occupancy/stream", include_in_schema=False)(self.stream)
        return router

    async def history(
        self, window: Window = "1s", span: Span = "2m", scope: ScopeText = "cluster", end_unix_ms: End = None
    ) -> OccupancyHistory:
        """Return the GPU time by phase of a scope, window by window: whole GPU-nanoseconds, with their coverage."""
        wanted, tier = parse_scope(scope), parse_tier(window)
        bounds_ns = self._bounds(tier, span, end_unix_ms)
        pieces = []
        for piece in sums(self._state.members, self._state.rollups, wanted, tier, bounds_ns):
            pieces.append(piece)
            await asyncio.sleep(0)
        return history(pieces, wanted, tier.window_ns, self._covered_to_ns())

    async def windows(self, window: Window = "100ms", span: Span = "2s", end_unix_ms: End = None) -> Response:
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

        `between=false` is for readers content with 100 ms. They get changes with the next tick, unless other
        readers want them sooner.
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
        end_ns = asked_end_ns(end_unix_ms, newest_ns)
        high_ns = max(-(-end_ns // length_ns) if length_ns > 10**8 else end_ns // length_ns, 0) * length_ns
        return max(high_ns - span_ns // length_ns * length_ns, 0), high_ns
