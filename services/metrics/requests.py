"""Finished requests: the log and its summaries over a window, and the Prometheus metrics that count each one."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from sys import intern
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PromCounter

from libs.contracts import metric_names as names
from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import NoWorkers, QueueFull
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, OUTCOME_REJECTED, Outcome, RequestEvent
from libs.policy.alerts.burn import JudgedRequest, missed_levels
from libs.policy.newest import put_newest
from libs.telemetry.gateways import AwaitedTokens
from libs.telemetry.pages import untouched_zeros
from libs.telemetry.timeline import HISTORY_NS

OK: Final = "ok"
"""The outcome of requests that ended normally."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    id: str
    prefill_worker: str
    decode_worker: str
    end_unix_ns: int
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ns: int
    ttft_ns: int | None
    tpot_ns: int | None
    ttft_target_ns: int | None
    """The client's TTFT limit, counted from arrival; null without one."""
    tpot_target_ns: int | None
    ttft_missed: bool | None
    """True if the first token came too late or never. Null without a target, or if the client caused the refusal."""
    tpot_missed: bool | None

    @property
    def computed_tokens(self) -> int:
        """The tokens of the request's prompt; 0 if the prompt was not computed."""
        return self.prompt_tokens if is_computed(ok=self.outcome == OK, ttft_ns=self.ttft_ns) else 0


def is_computed(*, ok: bool, ttft_ns: int | None) -> bool:
    """Return whether a request's prompt was computed; otherwise no worker computed its prompt tokens."""
    return ok or bool(ttft_ns)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a latency in seconds over `count` requests; null without requests."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The attainment of a target that is set per request."""

    requests: int
    """The number of requests that can be evaluated."""
    target_s: float | None
    """The median of the requests' targets; null if none has one."""
    met: float | None
    """The share of evaluated requests that met their target; null without evaluated requests."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    requests: int
    outcomes: dict[str, int]
    prompt_tokens: int
    """The tokens of prompts that were computed. A prompt whose client left before the first token does not count."""
    cached_tokens: int
    output_tokens: int
    ttft_s: Percentiles
    """The latencies of ended requests, and the waiting times so far of requests without a first token."""
    tpot_s: Percentiles
    queue_s: Percentiles
    ttft_slo: ServiceLevel
    """The attainment of ended requests, and of waiting ones whose first token is overdue."""
    tpot_slo: ServiceLevel
    awaited: int
    """People's requests that now wait for a first token; 0 for past windows."""


@dataclass(frozen=True, slots=True)
class ModelRequests:
    model: str
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class RequestsReport:
    window_ms: int
    as_of_unix_ns: int
    complete: bool
    """True if the log reaches back over the whole window."""
    total: RequestSummary
    models: list[ModelRequests]


END, QUEUE, TTFT, TPOT, PROMPT, CACHED, OUTPUT, TTFT_TARGET, TPOT_TARGET, TTFT_MISSED, TPOT_MISSED = range(11)
COLUMNS: Final = 11
NONE: Final = -1
"""The value of a latency, target or verdict that a request does not have."""
NONE_AWAITED: Final = AwaitedTokens()
MOST: Final = (1 << 63) - 1
"""Largest value of a column; larger reported values are clipped to it."""


class Names:
    """Numbers for names, counted by reference. Names come from clients, so unused ones must be freed."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._bearers: Counter[int] = Counter()
        self._free: list[int] = []

    def take(self, name: str) -> int:
        """Return a name's number, to be released with `give_back`."""
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[name], self._names[number] = number, name
        self._bearers[number] += 1
        return number

    def give_back(self, number: int) -> None:
        self._bearers[number] -= 1
        if not self._bearers[number]:
            del self._bearers[number], self._numbers[self._names.pop(number)]
            self._free.append(number)

    def of(self, number: int) -> str:
        return self._names[number]


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Rows of some requests: figures [n, COLUMNS] int64, model and outcome [n, 2] int32."""

    numbers: NDArray[np.int64]
    names: NDArray[np.int32]


class RequestTable:
    """A ring of rows, whose owner chooses the rows to write and to free."""

    def __init__(self, rows: int) -> None:
        self._numbers: NDArray[np.int64] = untouched_zeros((rows, COLUMNS), np.int64)  # an unused row ended at 0
        self._names: NDArray[np.int32] = untouched_zeros((rows, 2), np.int32)
        self._models, self._outcomes = Names(), Names()

    def put(self, row: int, finished: FinishedRequest) -> None:
        optional = (finished.ttft_target_ns, finished.tpot_target_ns, finished.ttft_missed, finished.tpot_missed)
        numbers = (
            finished.end_unix_ns,
            finished.queue_ns,
            NONE if finished.ttft_ns is None else finished.ttft_ns,
            NONE if finished.tpot_ns is None else finished.tpot_ns,
            finished.computed_tokens,
            finished.cached_tokens,
            finished.output_tokens,
            *(NONE if value is None else value for value in optional),
        )
        self._numbers[row] = [min(number, MOST) for number in numbers]
        self._names[row] = self._models.take(finished.model), self._outcomes.take(finished.outcome)

    def drop(self, row: int) -> None:
        self._numbers[row, END] = NONE
        model, outcome = self._names[row].tolist()
        self._models.give_back(model)
        self._outcomes.give_back(outcome)

    def within(self, low_ns: int, high_ns: int) -> RequestRows:
        """Return the requests that ended in [low, high)."""
        ends = self._numbers[:, END]
        inside = np.flatnonzero((ends >= max(low_ns, 1)) & (ends < high_ns))
        return RequestRows(self._numbers[inside], self._names[inside])

    def by_model(self, rows: RequestRows) -> list[tuple[str, RequestRows]]:
        """Group rows by the name of the model, in order."""
        order = np.argsort(rows.names[:, 0], kind="stable")
        models, starts = np.unique(rows.names[order, 0], return_index=True)
        parts = np.split(order, starts[1:]) if len(models) else []
        named = zip((self._models.of(int(number)) for number in models), parts, strict=True)
        return sorted(
            ((name, RequestRows(rows.numbers[part], rows.names[part])) for name, part in named), key=lambda p: p[0]
        )

    def summary(self, rows: RequestRows, awaited: AwaitedTokens = NONE_AWAITED) -> RequestSummary:
        numbers = rows.numbers
        outcomes, counts = np.unique(rows.names[:, 1], return_counts=True)
        by_outcome = {self._outcomes.of(int(each)): int(count) for each, count in zip(outcomes, counts, strict=True)}
        prompt, cached, output = numbers[:, [PROMPT, CACHED, OUTPUT]].sum(axis=0).tolist()
        return RequestSummary(
            requests=len(numbers),
            outcomes=dict(sorted(by_outcome.items())),
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            ttft_s=percentiles(_there(numbers[:, TTFT]), awaited.ages),
            tpot_s=percentiles(_there(numbers[:, TPOT])),
            queue_s=percentiles(numbers[numbers[:, TTFT] != NONE, QUEUE]),
            ttft_slo=_level(numbers[:, TTFT_TARGET], numbers[:, TTFT_MISSED], awaited.overdue),
            tpot_slo=_level(numbers[:, TPOT_TARGET], numbers[:, TPOT_MISSED]),
            awaited=awaited.requests,
        )


def percentiles(values_ns: NDArray[np.int64], more: Sequence[tuple[int, int]] = ()) -> Percentiles:
    """Compute percentiles by nearest rank, so that each is the latency of a request.

    `more` are pairs of a further value in ns and how often it counts.
    """
    found = nearest_ranks(values_ns, (50, 90, 99), more)
    if found is None:
        return Percentiles(0, None, None, None)
    p50, p90, p99 = (found / 1e9).tolist()
    return Percentiles(len(values_ns) + sum(times for _, times in more), p50, p90, p99)


def nearest_ranks(
    values_ns: NDArray[np.int64], percents: Sequence[int], more: Sequence[tuple[int, int]] = ()
) -> NDArray[np.int64] | None:
    """Return the percentiles in ns by nearest rank, None without values; `more` is that of `percentiles`."""
    count = len(values_ns) + sum(times for _, times in more)
    if not count:
        return None
    ranks = [-(-count * percent // 100) - 1 for percent in percents]
    if not more:
        found: NDArray[np.int64] = np.partition(values_ns, ranks)[ranks]
        return found
    values = np.concatenate([values_ns, np.array([value for value, _ in more], np.int64)])
    times = np.concatenate([np.ones(len(values_ns), np.int64), np.array([times for _, times in more], np.int64)])
    order = np.argsort(values)
    return values[order][np.searchsorted(np.cumsum(times[order]), ranks, side="right")]


def _level(targets_ns: NDArray[np.int64], missed: NDArray[np.int64], overdue: int = 0) -> ServiceLevel:
    """Return the attainment; `overdue` requests are unfinished but have already missed the target."""
    judged = _there(missed)
    requests = len(judged) + overdue
    return ServiceLevel(
        requests=requests,
        target_s=percentiles(_there(targets_ns)).p50,
        met=1 - (int(judged.sum()) + overdue) / requests if requests else None,
    )


def _there(values: NDArray[np.int64]) -> NDArray[np.int64]:
    there: NDArray[np.int64] = values[values != NONE]
    return there


MAX_REQUESTS: Final = 50_000
"""The bound on requests kept, 40 MB. Above 80 requests a second the log is shorter than `HISTORY_NS`, which summaries
report.
"""
REPORT_NS: Final = 1_000_000_000
"""The time for which a report is reused. Every open page requests one every two seconds."""
NOBODY_WAITS: Final[Mapping[str, AwaitedTokens]] = MappingProxyType({})
MAX_REPORTS: Final = 8  # windows whose report is cached
MAX_ID: Final = 140
"""The characters kept of a request's id. A client's own id has up to 128, and the number of a choice follows."""
MIN_PREFIX_CHARS: Final = 6
"""The fewest characters that count as the beginning of an id."""
SHED: Final = frozenset((QueueFull.code, NoWorkers.code))
"""Error codes of refusals that are not the client's fault."""
_OUTCOME_PREFIX: Final = "OUTCOME_"


class RequestLog:
    """The last finished requests in order of arrival; a repeated event is counted once."""

    def __init__(self) -> None:
        self._log: deque[tuple[bytes, FinishedRequest]] = deque()
        self._known: set[bytes] = set()
        # The newest event of each id, serialized; at most `MAX_REQUESTS`, as each belongs to an entry of the log.
        self._by_id: dict[str, bytes] = {}
        self._table = RequestTable(MAX_REQUESTS)
        self._entered = 0
        self._kept_from_ns = 0
        self._reports: OrderedDict[int, RequestsReport] = OrderedDict()

    def begin(self, read_from_ns: int) -> None:
        """Record that requests that ended before `read_from_ns` will not be read."""
        self._kept_from_ns = read_from_ns

    def add(self, event: RequestEvent, now_ns: int) -> FinishedRequest | None:
        """Record an event; return None if it is a duplicate."""
        # Delivery is at least once and the choices of a request share its id, so the whole value names an event.
        identity = event.SerializeToString(deterministic=True)
        if identity in self._known:
            return None
        finished = finished_request(event)
        if len(self._log) == MAX_REQUESTS:
            self._drop()
        self._table.put(self._entered % MAX_REQUESTS, finished)
        self._log.append((identity, finished))
        self._by_id[finished.id] = identity
        self._entered += 1
        self._known.add(identity)
        while self._log and self._log[0][1].end_unix_ns < now_ns - HISTORY_NS:
            self._drop()
        return finished

    def _drop(self) -> None:
        self._table.drop((self._entered - len(self._log)) % MAX_REQUESTS)
        identity, gone = self._log.popleft()
        self._known.discard(identity)
        if self._by_id.get(gone.id) is identity:  # clients may use an id again
            del self._by_id[gone.id]
        self._kept_from_ns = max(self._kept_from_ns, gone.end_unix_ns)

    def event(self, request_id: str) -> RequestEvent | None:
        """Return the newest event with this id."""
        found = self._by_id.get(request_id[:MAX_ID])
        return None if found is None else RequestEvent.FromString(found)

    def ids_from(self, prefix: str, limit: int) -> list[str]:
        """Return at most `limit` ids that begin with `prefix`; none if it is shorter than `MIN_PREFIX_CHARS`."""
        if len(prefix) < MIN_PREFIX_CHARS:
            return []
        return list(islice((each for each in self._by_id if each.startswith(prefix)), limit))

    def newest(self, limit: int, worker_id: str | None = None) -> list[FinishedRequest]:
        """Return the last requests, or those in which a worker took part, at most `limit`, the newest first."""
        newest = (finished for _, finished in reversed(self._log))
        return list(islice((each for each in newest if _has_part(each, worker_id)), limit))

    def slowest(self, limit: int, start_ns: int, end_ns: int, worker_id: str | None = None) -> list[FinishedRequest]:
        """Return the requests that ended in [start, end) with a token, by TTFT, the longest first."""
        inside = (
            (each.ttft_ns, -number, each)
            for number, (_, each) in enumerate(self._log)
            if each.ttft_ns is not None and start_ns <= each.end_unix_ns < end_ns and _has_part(each, worker_id)
        )
        return [each for _, _, each in nlargest(limit, inside)]

    def report(
        self, end_ns: int, window_ns: int, awaited: Mapping[str, AwaitedTokens] = NOBODY_WAITS
    ) -> RequestsReport:
        """Return the requests that ended in the window as of `end_ns`, or as of up to `REPORT_NS` earlier.

        `awaited` are, by model, those that wait for a first token; only windows that end now have any.
        """
        known = self._reports.get(window_ns)
        if known is None or not 0 <= end_ns - known.as_of_unix_ns < REPORT_NS:
            known = self._report(end_ns, window_ns, awaited)
            put_newest(self._reports, window_ns, known, MAX_REPORTS)
        return known

    def _report(self, end_ns: int, window_ns: int, awaited: Mapping[str, AwaitedTokens]) -> RequestsReport:
        table, start_ns = self._table, end_ns - window_ns
        inside = table.within(start_ns, end_ns)
        all_awaited = NONE_AWAITED
        for each in awaited.values():
            all_awaited = all_awaited.plus(each)
        by_model = dict(table.by_model(inside))
        none = RequestRows(inside.numbers[:0], inside.names[:0])
        return RequestsReport(
            window_ms=window_ns // 1_000_000,
            as_of_unix_ns=end_ns,
            complete=self._kept_from_ns < start_ns,
            total=table.summary(inside, all_awaited),
            models=[
                ModelRequests(model, table.summary(by_model.get(model, none), awaited.get(model, NONE_AWAITED)))
                for model in sorted(by_model.keys() | awaited.keys())
            ],
        )


def _has_part(finished: FinishedRequest, worker_id: str | None) -> bool:
    return worker_id is None or worker_id in (finished.prefill_worker, finished.decode_worker)


def finished_request(event: RequestEvent) -> FinishedRequest:
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


MAX_MODELS: Final = 64
"""The maximum number of model labels. Names come from clients, so later ones are counted as `OTHER_MODEL`."""
OTHER_MODEL: Final = "other"
TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
TPOT_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
QUEUE_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)


class RequestMetrics:
    """Counters and latency histograms of finished requests, by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: set[str] = set()
        self._requests = PromCounter(
            names.REQUESTS_TOTAL, "Finished requests.", ("model", "outcome"), registry=registry
        )
        self._slos = PromCounter(
            names.SLO_REQUESTS_TOTAL,
            "Requests by whether they met it.",
            ("model", "slo", "kept"),
            registry=registry,
        )
        self._prompt_tokens = _counter(names.REQUEST_PROMPT_TOKENS_TOTAL, "Tokens of computed prompts.", registry)
        self._cached_tokens = _counter(names.REQUEST_CACHED_TOKENS_TOTAL, "Prompt tokens found cached.", registry)
        self._output_tokens = _counter(names.REQUEST_OUTPUT_TOKENS_TOTAL, "Tokens generated.", registry)
        self._queue = _histogram(names.REQUEST_QUEUE_SECONDS, "Arrival until bound.", QUEUE_BUCKETS_S, registry)
        self._ttft = _histogram(names.REQUEST_TTFT_SECONDS, "Arrival until the first token.", TTFT_BUCKETS_S, registry)
        self._tpot = _histogram(names.REQUEST_TPOT_SECONDS, "Mean time per output token.", TPOT_BUCKETS_S, registry)

    def observe(self, finished: FinishedRequest) -> None:
        model = self._label(finished.model)
        self._requests.labels(model, finished.outcome).inc()
        self._prompt_tokens.labels(model).inc(finished.computed_tokens)
        self._cached_tokens.labels(model).inc(finished.cached_tokens)
        self._output_tokens.labels(model).inc(finished.output_tokens)
        if finished.ttft_ns is not None:
            self._queue.labels(model).observe(finished.queue_ns / 1e9)
            self._ttft.labels(model).observe(finished.ttft_ns / 1e9)
        if finished.tpot_ns is not None:
            self._tpot.labels(model).observe(finished.tpot_ns / 1e9)

    def judge(self, model: str, slo: str, *, bad: bool) -> None:
        """Count a request by whether it met a service level."""
        self._slos.labels(self._label(model), slo, "no" if bad else "yes").inc()

    def _label(self, model: str) -> str:
        if model not in self._models and len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model if model in self._models else OTHER_MODEL


def _counter(name: str, documentation: str, registry: CollectorRegistry) -> PromCounter:
    return PromCounter(name, documentation, ("model",), registry=registry)


def _histogram(name: str, documentation: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, documentation, ("model",), buckets=buckets, registry=registry)
