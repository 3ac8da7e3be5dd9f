"""A bounded log of finished requests, with counts and latency percentiles over a window. Pure."""

from collections import deque
from itertools import islice
from sys import intern
from typing import Final

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import NoWorkers, QueueFull
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, OUTCOME_REJECTED, Outcome, RequestEvent
from libs.policy.alerts.slo_attainment import JudgedRequest, missed_levels
from libs.telemetry.timeline import HISTORY_NS
from services.metrics.requests.table import RequestTable
from services.metrics.requests.wire import FinishedRequest, ModelRequests, RequestsReport

MAX_REQUESTS: Final = 50_000
"""The most requests kept, 40 MB. Above 80 requests a second the log is shorter than `HISTORY_NS`, which summaries
report.
"""
REPORT_NS: Final = 1_000_000_000
"""The time for which a report is reused. Every open page requests one each two seconds."""
MAX_REPORTS: Final = 8
"""The most windows whose report is cached."""
MAX_ID: Final = 100
"""The most characters kept of a request's id."""
SHED: Final = frozenset((QueueFull.code, NoWorkers.code))
"""Error codes of refusals that are not the client's fault."""
_OUTCOME_PREFIX: Final = "OUTCOME_"


class RequestLog:
    """The last finished requests in order of arrival; a repeated event is counted once."""

    def __init__(self) -> None:
        self._log: deque[tuple[bytes, FinishedRequest]] = deque()
        self._known: set[bytes] = set()
        self._table = RequestTable(MAX_REQUESTS)
        self._entered = 0
        self._kept_from_ns = 0
        self._reports: dict[int, RequestsReport] = {}

    def begin(self, read_from_ns: int) -> None:
        """Record that requests that ended before `read_from_ns` will not be read."""
        self._kept_from_ns = read_from_ns

    def add(self, event: RequestEvent, now_ns: int) -> FinishedRequest | None:
        """Record an event; None if it has come before."""
        # Delivery is at least once and the choices of a request share its id, so the whole value names an event.
        identity = event.SerializeToString(deterministic=True)
        if identity in self._known:
            return None
        finished = _finished(event)
        if len(self._log) == MAX_REQUESTS:
            self._drop()
        self._table.put(self._entered % MAX_REQUESTS, finished)
        self._log.append((identity, finished))
        self._entered += 1
        self._known.add(identity)
        while self._log and self._log[0][1].end_unix_ns < now_ns - HISTORY_NS:
            self._drop()
        return finished

    def _drop(self) -> None:
        self._table.drop((self._entered - len(self._log)) % MAX_REQUESTS)
        identity, gone = self._log.popleft()
        self._known.discard(identity)
        self._kept_from_ns = max(self._kept_from_ns, gone.end_unix_ns)

    def of_worker(self, worker_id: str, limit: int) -> list[FinishedRequest]:
        """Return the last requests in which a worker took part, at most `limit`, the newest first."""
        newest = (finished for _, finished in reversed(self._log))
        return list(islice((each for each in newest if worker_id in (each.prefill_worker, each.decode_worker)), limit))

    def report(self, end_ns: int, window_ns: int) -> RequestsReport:
        """Return the requests that ended in the window, as of `end_ns` or up to `REPORT_NS` before."""
        known = self._reports.get(window_ns)
        if known is None or not 0 <= end_ns - known.as_of_unix_ns < REPORT_NS:
            self._reports.pop(window_ns, None)
            if len(self._reports) >= MAX_REPORTS:
                del self._reports[next(iter(self._reports))]
            known = self._reports[window_ns] = self._report(end_ns, window_ns)
        return known

    def _report(self, end_ns: int, window_ns: int) -> RequestsReport:
        table, start_ns = self._table, end_ns - window_ns
        inside = table.within(start_ns, end_ns)
        return RequestsReport(
            window_ms=window_ns // 1_000_000,
            as_of_unix_ns=end_ns,
            complete=self._kept_from_ns < start_ns,
            total=table.summary(inside),
            models=[ModelRequests(model, table.summary(rows)) for model, rows in table.by_model(inside)],
        )


def _finished(event: RequestEvent) -> FinishedRequest:
    missed = missed_levels(_judged(event))
    deadline_ns = max(event.ttft_deadline_unix_ns - event.arrival_unix_ns, 0)
    awaited = (
        event.service_class != BATCH_CLASS
    )  # no client waits for a line of a batch job, so its targets do not count
    return FinishedRequest(
        id=event.request_id[:MAX_ID],
        prefill_worker=intern(event.prefill_worker),
        decode_worker=intern(event.decode_worker),
        end_unix_ns=event.arrival_unix_ns + (event.ttft_ns + event.decode_ns if event.ttft_ns else event.queue_ns),
        model=intern(event.model),
        outcome=outcome_name(event.outcome),
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        output_tokens=event.output_tokens,
        queue_ns=event.queue_ns,
        ttft_ns=event.ttft_ns or None,
        tpot_ns=event.decode_ns // (event.output_tokens - 1) if event.output_tokens > 1 else None,
        ttft_target_ns=deadline_ns if event.ttft_deadline_unix_ns and awaited else None,
        tpot_target_ns=(event.tpot_target_us * 1_000 or None) if awaited else None,
        ttft_missed=missed.ttft,
        tpot_missed=missed.tpot,
    )


def _judged(event: RequestEvent) -> JudgedRequest:
    return JudgedRequest(
        failed=event.outcome == OUTCOME_FAILED,
        shed=event.outcome == OUTCOME_REJECTED and event.error_code in SHED,
        arrival_unix_ns=event.arrival_unix_ns,
        ttft_ns=event.ttft_ns,
        ttft_deadline_unix_ns=event.ttft_deadline_unix_ns,
        decode_ns=event.decode_ns,
        output_tokens=event.output_tokens,
        tpot_target_ns=event.tpot_target_us * 1_000,
    )


def outcome_name(outcome: Outcome) -> str:
    """Return ok, client_gone, rejected or failed; unspecified for an unknown outcome."""
    if outcome not in Outcome.values():
        return "unspecified"
    return Outcome.Name(outcome).removeprefix(_OUTCOME_PREFIX).lower()
