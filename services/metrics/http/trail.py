"""The route of what the status said before."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from libs.contracts.errors import InvalidRequest
from libs.runtime.clock import Clock
from services.metrics.accounting.window import TIER_NAMES, parse_span_ns, parse_tier
from services.metrics.http.history import BAD_QUERY, End, Span, asked_end_ns
from services.metrics.trail.rings import TIERS
from services.metrics.trail.trail import Trail

LENGTHS = [name for name, tier in TIER_NAMES.items() if tier in TIERS]
Window = Annotated[str, Query(description=f"Length of each window: {', '.join(LENGTHS)}.")]


def trail_router(trail: Trail, clock: Clock) -> APIRouter:
    """`/v1/status/history`."""
    router = APIRouter(prefix="/v1")

    @router.get("/status/history", responses=BAD_QUERY)
    async def status_history(window: Window = "1s", span: Span = "2m", end_unix_ms: End = None) -> Response:
        """Pressure of each model, traffic, and verdicts, window by window; null where nothing is known."""
        tier = parse_tier(window)
        if tier not in TIERS:
            raise InvalidRequest(f"window={window[:40]!r} is not one of {', '.join(LENGTHS)}", param="window")
        length_ns, span_ns = tier.window_ns, parse_span_ns(span, tier)
        high_ns = -(-asked_end_ns(end_unix_ms, clock.now_ns()) // length_ns) * length_ns
        reported = trail.history(length_ns, max(high_ns - span_ns // length_ns * length_ns, 0), high_ns)
        return Response(msgspec.json.encode(reported), media_type="application/json")

    return router
