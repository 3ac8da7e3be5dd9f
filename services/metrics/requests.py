"""Finished requests: a bounded log, counts and latency percentiles over a window of it, one worker's newest. Pure."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from sys import intern
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import Outcome, RequestEvent
from libs.telemetry.timeline import HISTORY_NS

MAX_REQUESTS: Final = 50_000
"""Kept at most, 40 MB; at more than 80 a second the log is shorter than `HISTORY_NS`, and summaries say so."""
MAX_ID: Final = 100
"""Characters of a request's id that are kept."""
_OUTCOME_PREFIX: Final = "OUTCOME_"


@dataclass(frozen=True, slots=True)
class Finished:
    """What is kept of a request."""

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


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a latency in seconds, over `count` requests; null without any."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Requests that ended in the window."""

    requests: int
    outcomes: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    queue_s: Percentiles


@dataclass(frozen=True, slots=True)
class ModelRequests:
    """The summary of one model."""

    model: str
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class RequestsReport:
    """All models together, and each."""

    window_ms: int
    as_of_unix_ns: int
    complete: bool
    """Whether the log reaches back over the whole window."""
    total: RequestSummary
    models: list[ModelRequests]


class RequestLog:
    """The last finished requests, oldest first as they came; a repeated event is counted once."""

    def __init__(self) -> None:
        self._log: deque[tuple[bytes, Finished]] = deque()
        self._known: set[bytes] = set()
        self._kept_from_ns = 0

    def add(self, event: RequestEvent, now_ns: int) -> Finished | None:
        """Enter an event; None when it has come before."""
        # Delivery is at least once and the choices of a request share its id, so the whole value names an event.
        identity = event.SerializeToString(deterministic=True)
        if identity in self._known:
            return None
        finished = _finished(event)
        self._log.append((identity, finished))
        self._known.add(identity)
        while len(self._log) > MAX_REQUESTS or self._log[0][1].end_unix_ns < now_ns - HISTORY_NS:
            gone_identity, gone = self._log.popleft()
            self._known.discard(gone_identity)
            self._kept_from_ns = max(self._kept_from_ns, gone.end_unix_ns)
            if not self._log:
                break
        return finished

    def of_worker(self, worker_id: str, limit: int) -> list[Finished]:
        """The last that a worker had a part in, at most so many, the newest first."""
        newest = (finished for _, finished in reversed(self._log))
        return list(islice((each for each in newest if worker_id in (each.prefill_worker, each.decode_worker)), limit))

    def report(self, end_ns: int, window_ns: int) -> RequestsReport:
        """Requests that ended in the window."""
        start_ns = end_ns - window_ns
        inside = [finished for _, finished in self._log if start_ns <= finished.end_unix_ns < end_ns]
        models = sorted({finished.model for finished in inside})
        return RequestsReport(
            window_ms=window_ns // 1_000_000,
            as_of_unix_ns=end_ns,
            complete=self._kept_from_ns < start_ns,
            total=_summary(inside),
            models=[
                ModelRequests(model, _summary([finished for finished in inside if finished.model == model]))
                for model in models
            ],
        )


def _finished(event: RequestEvent) -> Finished:
    return Finished(
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
    )


def outcome_name(outcome: Outcome) -> str:
    """ok, client_gone, rejected, failed, or unspecified for one that is not known here."""
    if outcome not in Outcome.values():
        return "unspecified"
    return Outcome.Name(outcome).removeprefix(_OUTCOME_PREFIX).lower()


def _summary(requests: Sequence[Finished]) -> RequestSummary:
    return RequestSummary(
        requests=len(requests),
        outcomes=dict(sorted(Counter(finished.outcome for finished in requests).items())),
        prompt_tokens=sum(finished.prompt_tokens for finished in requests),
        cached_tokens=sum(finished.cached_tokens for finished in requests),
        output_tokens=sum(finished.output_tokens for finished in requests),
        ttft_s=percentiles([finished.ttft_ns for finished in requests if finished.ttft_ns is not None]),
        tpot_s=percentiles([finished.tpot_ns for finished in requests if finished.tpot_ns is not None]),
        queue_s=percentiles([finished.queue_ns for finished in requests if finished.ttft_ns is not None]),
    )


def percentiles(values_ns: Sequence[int]) -> Percentiles:
    """Nearest rank: each is a latency that some request had."""
    ordered = sorted(values_ns)

    def rank(percent: int) -> float | None:
        return ordered[-(-len(ordered) * percent // 100) - 1] / 1e9 if ordered else None

    return Percentiles(len(ordered), rank(50), rank(90), rank(99))
