"""Finished requests over the last seconds: rates, errors, refusals, cache hits. Pure; time is passed in."""

from collections import Counter, deque
from dataclasses import dataclass
from statistics import median
from typing import Final

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import QueueFull
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, OUTCOME_REJECTED, RequestEvent

SPAN_NS: Final = 10_000_000_000
MAX_MODELS: Final = 64
"""Whose targets are remembered."""
MAX_REQUESTS: Final = 20_000
"""That are kept of the span; with more, rates are of a shorter time."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Over `window_ms`, of all models."""

    window_ms: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    errors_per_s: float
    """Requests that failed by a fault of ours."""
    rejected_per_s: float
    """Refused, but not for lack of room."""
    too_many_per_s: float
    """Refused for lack of room (429)."""
    cache_hit: float | None
    """Share of prompt tokens that were found cached; null without any."""
    ttft_p50_ms: float | None
    """Of people's requests, as all four."""
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    batch_lines_per_s: float
    """Lines of batch jobs that ended; a part of `requests_per_s`."""
    batch_waiting: int | None = None
    """Lines that wait at gateways now; a job's further ones come as these go. Null while no gateway is heard."""
    batch_at_workers: int | None = None
    """Lines that workers have now."""


@dataclass(frozen=True, slots=True)
class _Request:
    heard_ns: int
    model: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    failed: bool
    rejected: bool
    too_many: bool
    ttft_ns: int
    tpot_ns: int
    ttft_limit_ns: int
    tpot_target_ns: int
    batch: bool
    """A line of a batch job."""


class TrafficLog:
    """Requests as their events come; one that comes twice counts twice, which delivery seldom does."""

    def __init__(self) -> None:
        self._requests: deque[_Request] = deque(maxlen=MAX_REQUESTS)
        self._targets_ns: dict[str, tuple[int, int]] = {}
        """By model, as they were last known."""

    def take(self, event: RequestEvent, now_ns: int) -> None:
        """Enter a request that ended."""
        rejected = event.outcome == OUTCOME_REJECTED
        too_many = rejected and event.error_code == QueueFull.code
        limited = event.ttft_deadline_unix_ns > event.arrival_unix_ns
        self._requests.append(
            _Request(
                now_ns,
                event.model,
                event.prompt_tokens,
                event.cached_tokens,
                event.output_tokens,
                event.outcome == OUTCOME_FAILED,
                rejected and not too_many,
                too_many,
                event.ttft_ns,
                event.decode_ns // (event.output_tokens - 1) if event.output_tokens > 1 else 0,
                event.ttft_deadline_unix_ns - event.arrival_unix_ns if limited else 0,
                event.tpot_target_us * 1_000,
                event.service_class == BATCH_CLASS,
            )
        )

    def traffic(self, now_ns: int) -> Traffic:
        """Of the last `SPAN_NS`."""
        self._forget(now_ns)
        found, seconds = self._requests, SPAN_NS / 1e9
        sums: Counter[str] = Counter()
        for each in found:
            sums["prompt"] += each.prompt_tokens
            sums["cached"] += each.cached_tokens
            sums["output"] += each.output_tokens
            sums["failed"] += each.failed
            sums["rejected"] += each.rejected
            sums["too_many"] += each.too_many
            sums["batch"] += each.batch
        people = [each for each in found if not each.batch]
        ttfts = sorted(each.ttft_ns / 1e6 for each in people if each.ttft_ns)
        tpots = sorted(each.tpot_ns / 1e6 for each in people if each.tpot_ns)
        return Traffic(
            window_ms=SPAN_NS // 1_000_000,
            requests_per_s=len(found) / seconds,
            prompt_tokens_per_s=sums["prompt"] / seconds,
            output_tokens_per_s=sums["output"] / seconds,
            errors_per_s=sums["failed"] / seconds,
            rejected_per_s=sums["rejected"] / seconds,
            too_many_per_s=sums["too_many"] / seconds,
            cache_hit=sums["cached"] / sums["prompt"] if sums["prompt"] else None,
            ttft_p50_ms=_rank(ttfts, 50),
            ttft_p95_ms=_rank(ttfts, 95),
            tpot_p50_ms=_rank(tpots, 50),
            tpot_p95_ms=_rank(tpots, 95),
            batch_lines_per_s=sums["batch"] / seconds,
        )

    def cache_hit(self, model: str, now_ns: int) -> float:
        """Share of prompt tokens of people's requests for a model that were found cached; 0: nothing is known."""
        self._forget(now_ns)
        own = [each for each in self._requests if each.model == model and not each.batch]
        prompt = sum(each.prompt_tokens for each in own)
        return sum(each.cached_tokens for each in own) / prompt if prompt else 0.0

    def refused_tokens_per_s(self, model: str, now_ns: int, span_ns: int) -> float:
        """Prompt tokens of requests that were refused for lack of room: they came too."""
        self._forget(now_ns)
        tokens = (
            each.prompt_tokens
            for each in self._requests
            if each.too_many and each.model == model and each.heard_ns > now_ns - span_ns
        )
        return sum(tokens) * 1e9 / span_ns

    def targets_ns(self, model: str) -> tuple[int, int]:
        """The usual TTFT limit and TPOT target of people's requests for a model, as last known; 0 where none is. Lines
        of batch jobs may take hours."""
        limit_ns, tpot_ns = self._targets_ns.get(model, (0, 0))
        own = [each for each in self._requests if each.model == model and not each.batch]
        limits = [each.ttft_limit_ns for each in own if each.ttft_limit_ns]
        tpots = [each.tpot_target_ns for each in own if each.tpot_target_ns]
        found = round(median(limits)) if limits else limit_ns, round(median(tpots)) if tpots else tpot_ns
        if own and (model in self._targets_ns or len(self._targets_ns) < MAX_MODELS):
            self._targets_ns[model] = found
        return found

    def asked_tpot_ns(self) -> dict[str, int]:
        """TPOT targets by model, as last known, of those whose requests name some."""
        return {model: tpot_ns for model, (_, tpot_ns) in self._targets_ns.items() if tpot_ns}

    def _forget(self, now_ns: int) -> None:
        while self._requests and self._requests[0].heard_ns <= now_ns - SPAN_NS:
            self._requests.popleft()


def _rank(ordered: list[float], percent: int) -> float | None:
    """Nearest rank."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None
