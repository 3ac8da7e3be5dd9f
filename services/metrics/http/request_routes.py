"""The routes of finished requests: one with its stages, the latest, the slowest, and summaries."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query

from libs.contracts.errors import InvalidRequest, RequestNotFound, quoted
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.runtime.clock import Clock
from libs.telemetry.gateways import AwaitedTokens
from libs.telemetry.timeline import HISTORY_NS
from services.metrics.accounting.series import ALLOWED_WINDOWS, parse_window_ns
from services.metrics.http.parameters import BAD_WINDOW, End, Window, requested_end_ns
from services.metrics.requests import (
    MAX_REQUESTS,
    MIN_PREFIX_CHARS,
    FinishedRequest,
    RequestLog,
    RequestsReport,
    finished_request,
)

MAX_LISTED: Final = 1_000
DEFAULT_LISTED: Final = 50
SLOWEST_WINDOW: Final = "10m"
MAX_CANDIDATES: Final = 5
"""The maximum number of ids named if a prefix matches several requests."""
OPENAI_PREFIXES: Final = ("chatcmpl-", "cmpl-")
"""The prefixes that the gateway's answers add to request ids."""
KEPT_REQUESTS: Final = (
    f"those that ended in the last {HISTORY_NS // 60_000_000_000} minutes are kept, {MAX_REQUESTS:,} at most, since "
    "the metrics service began to read; one that still runs is not among them"
)

Awaited = Callable[[int], Mapping[str, AwaitedTokens]]
Report = Callable[[int, int, Mapping[str, AwaitedTokens]], RequestsReport]
StageName = Literal["queue", "prefill", "hand_off", "decode"]


@dataclass(frozen=True, slots=True)
class RequestStage:
    """A stretch of a request's time; the stages follow one another without a gap.

    `queue` lasts from the arrival until the request was first bound to workers. `prefill` lasts until the first token:
    waiting at the worker, computing the prompt, and any further tries. `hand_off` lasts from there until the second
    token, if another worker decodes: the rest of the KV transfer and the start of decoding. `decode` is the rest.
    """

    name: StageName
    at: str
    """The gateway or worker that held the request."""
    start_ns: int
    """The nanoseconds from the request's arrival to the beginning of the stage."""
    duration_ns: int


@dataclass(frozen=True, slots=True)
class RequestDetail(FinishedRequest):
    """One finished request with its stages; stages of unknown duration are left out."""

    gateway: str
    tenant: str
    service_class: str
    arrival_unix_ns: int
    finish_reason: str
    """The reason for a normal end; empty after any other end."""
    error_code: str
    max_output_tokens: int | None
    """The maximum number of tokens that the request was allowed."""
    predicted_ttft_ns: int | None
    """The TTFT predicted when the request was first bound; null if it never was."""
    reroutes: int
    """The number of times that the request was sent to other workers, because its worker failed or had changed its
    role.
    """
    moves: int
    """The number of times that the request continued on another worker with its KV, because its own changed its role.
    """
    recomputes: int
    """The number of times that the request's prompt was computed again after the first token."""
    traceparent: str
    stages: list[RequestStage]


def request_detail(event: RequestEvent) -> RequestDetail:
    return RequestDetail(
        **asdict(finished_request(event)),
        gateway=event.gateway_id,
        tenant=event.tenant,
        service_class=event.service_class,
        arrival_unix_ns=event.arrival_unix_ns,
        finish_reason=event.finish_reason,
        error_code=event.error_code,
        max_output_tokens=event.max_output_tokens or None,
        predicted_ttft_ns=event.predicted_ttft_ns or None,
        reroutes=event.reroutes,
        moves=event.moves,
        recomputes=event.recomputes,
        traceparent=event.traceparent,
        stages=stages(event),
    )


def stages(event: RequestEvent) -> list[RequestStage]:
    """Return the stages whose times the event has, in order."""
    prefill_worker = event.prefill_worker or event.decode_worker
    decode_worker = event.decode_worker or event.prefill_worker
    bound_ns, first_ns, second_ns = event.queue_ns, event.ttft_ns, event.second_token_ns
    found: list[RequestStage] = []
    if bound_ns or first_ns:
        found.append(RequestStage("queue", event.gateway_id, 0, bound_ns))
    if first_ns:
        found.append(RequestStage("prefill", prefill_worker, bound_ns, max(first_ns - bound_ns, 0)))
    # Gateways of older releases report no second token.
    handed_off = decode_worker != prefill_worker and second_ns >= first_ns > 0
    if handed_off:
        found.append(RequestStage("hand_off", decode_worker, first_ns, second_ns - first_ns))
    if first_ns and event.decode_ns:
        begun_ns = second_ns if handed_off else first_ns
        found.append(RequestStage("decode", decode_worker, begun_ns, max(first_ns + event.decode_ns - begun_ns, 0)))
    return found


def find_event(log: RequestLog, request_id: str) -> RequestEvent:
    """Return the event with an id, with the id in a gateway's answer, or with the only id that has this prefix.

    Raise RequestNotFound, or InvalidRequest if several ids have the prefix.
    """
    bare = next((request_id.removeprefix(each) for each in OPENAI_PREFIXES if request_id.startswith(each)), request_id)
    for exact in (request_id, bare):
        if (event := log.event(exact)) is not None:
            return event
    found = log.ids_from(bare, MAX_CANDIDATES + 1)
    if len(found) > 1:
        more = " and others" if len(found) > MAX_CANDIDATES else ""
        raise InvalidRequest(
            f"several requests begin with {quoted(bare)}: {', '.join(found[:MAX_CANDIDATES])}{more}", param="request_id"
        )
    event = log.event(found[0]) if found else None
    if event is not None:
        return event
    short = f"; the beginning of an id needs {MIN_PREFIX_CHARS} characters" if len(bare) < MIN_PREFIX_CHARS else ""
    raise RequestNotFound(
        f"no finished request {quoted(request_id)} is kept: {KEPT_REQUESTS}{short}", param="request_id"
    )


Worker = Annotated[str | None, Query(description="Id of a worker that computed their prompt or their tokens.")]
Limit = Annotated[int | None, Query(ge=1, le=MAX_LISTED, description="How many, the newest first; 50 by default.")]
Slowest = Annotated[
    int | None, Query(ge=1, le=MAX_LISTED, description="List this many by TTFT instead, the longest first.")
]
SlowestWindow = Annotated[str | None, Query(description=f"With slowest: {ALLOWED_WINDOWS}; 10m by default.")]
UNKNOWN: Final[dict[int | str, dict[str, Any]]] = {
    400: {"description": "several ids have this prefix; the error names them"},
    404: {"description": f"no such request is kept: {KEPT_REQUESTS}"},
}


def requests_router(
    log: RequestLog, clock: Clock, awaited: Awaited = lambda now_ns: {}, report: Report | None = None
) -> APIRouter:
    """Serve finished requests; `awaited` returns how long others have waited for a first token, by model.

    `report` summarises them in place of the log's own.
    """
    report = report or log.report
    router = APIRouter(prefix="/v1")

    @router.get("/requests/summary", responses=BAD_WINDOW)
    async def requests_summary(window: Window = "1m", end_unix_ms: End = None) -> RequestsReport:
        """Summarise requests that ended in the window: counts, TTFT and TPOT percentiles in seconds, in total and by
        model. TTFT includes the waiting time so far of requests without a first token.
        """
        now_ns = clock.now_ns()
        end_ns = requested_end_ns(end_unix_ms, now_ns)
        return report(end_ns, parse_window_ns(window), awaited(now_ns) if end_ns == now_ns else {})

    @router.get("/requests")
    async def requests(
        worker: Worker = None, limit: Limit = None, slowest: Slowest = None, window: SlowestWindow = None
    ) -> list[FinishedRequest]:
        """List the last finished requests, of a worker or of all, or with `slowest` those of the window with the
        longest TTFT.
        """
        if slowest is None:
            if window is not None:
                raise InvalidRequest("window goes with slowest=N, which is not given", param="window")
            return log.newest(limit or DEFAULT_LISTED, worker)
        if limit is not None:
            raise InvalidRequest("limit is for the newest requests; slowest=N already sets the number", param="limit")
        end_ns = clock.now_ns()
        return log.slowest(slowest, end_ns - parse_window_ns(window or SLOWEST_WINDOW), end_ns, worker)

    # Clients choose ids, which may contain a slash.
    @router.get("/requests/{request_id:path}", responses=UNKNOWN)
    async def request(request_id: str) -> RequestDetail:
        """Return one finished request and the time that it spent in each stage, by its id or a prefix of it."""
        return request_detail(find_event(log, request_id))

    return router
