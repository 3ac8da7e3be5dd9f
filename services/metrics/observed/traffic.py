"""Traffic of observed servers, from their counters and histograms. Pure; time is passed in."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.observe.vllm import QUEUE_TIME, TPOT, TTFT, Buckets, EngineSample, ServerSample
from libs.policy.verdict.late import Punctuality
from libs.telemetry.gateways import AwaitedTokens
from services.metrics.requests import ModelRequests, Percentiles, RequestsReport, RequestSummary, ServiceLevel
from services.metrics.status.traffic import SPAN_NS, Traffic

SECOND_NS: Final = 1_000_000_000
KEPT_S: Final = 60
"""The seconds for which figures are kept."""
MAX_MODELS: Final = 64
"""The maximum number of models whose traffic is counted."""
TPOT_SPAN_NS: Final = 2 * SECOND_NS

Span = tuple[float, float]
"""A bucket's bounds in seconds."""


@dataclass(slots=True)
class _Second:
    """The counts of one model's servers for one second."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Counter[Span]] = field(default_factory=dict)


class ObservedTraffic:
    """A substitute for the log of finished requests, built from counters and histograms.

    Percentiles are interpolated within a server's buckets, so they are as coarse as those.
    """

    def __init__(self, *, ttft_limit_ns: int, tpot_ns: int) -> None:
        """Create an empty log; an answer over either target is late."""
        self._ttft_limit_s = ttft_limit_ns / SECOND_NS
        self._tpot_s = tpot_ns / SECOND_NS
        self._seconds: dict[str, deque[_Second]] = {}

    def enter(self, model: str, before: ServerSample, after: ServerSample, now_ns: int) -> None:
        """Add the server's counts between two samples of one process."""
        if model not in self._seconds and len(self._seconds) >= MAX_MODELS:
            return
        kept = self._seconds.setdefault(model, deque(maxlen=KEPT_S))
        number = now_ns // SECOND_NS
        if not kept or kept[-1].number < number:
            kept.append(_Second(number))
        second = kept[-1]
        for name, engine in after.engines.items():
            if (known := before.engines.get(name)) is not None:
                _add(second, known, engine)

    # The verdict's queries to a log of requests.

    def take(self, event: RequestEvent, now_ns: int) -> None:
        """Ignore a gateway's request, since observed servers have no gateway."""

    def traffic(self, now_ns: int, awaited: Iterable[tuple[int, int]] = ()) -> Traffic:
        """Return the traffic of all models over the last ten seconds."""
        found, seconds = self._sum(self._seconds, now_ns, SPAN_NS), SPAN_NS / SECOND_NS
        counts, histograms = found.counts, found.histograms
        ttft, tpot = histograms.get(TTFT, Counter()), histograms.get(TPOT, Counter())
        prompt = counts["computed"] + counts["cached"]
        return Traffic(
            window_ms=SPAN_NS // 1_000_000,
            requests_per_s=counts["ended"] / seconds,
            prompt_tokens_per_s=prompt / seconds,
            output_tokens_per_s=counts["generated"] / seconds,
            errors_per_s=0.0,
            rejected_per_s=0.0,
            too_many_per_s=0.0,
            cache_hit=counts["cached"] / prompt if prompt else None,
            ttft_p50_ms=_ms(percentile(ttft, 50)),
            ttft_p95_ms=_ms(percentile(ttft, 95)),
            tpot_p50_ms=_ms(percentile(tpot, 50)),
            tpot_p95_ms=_ms(percentile(tpot, 95)),
            batch_lines_per_s=0.0,
        )

    def cache_hit(self, model: str, now_ns: int) -> float:
        """Return 0, since the reported arrivals contain computed tokens only."""
        return 0.0

    def late(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return the number of first tokens in a span, and the number of those that were certainly late."""
        return self._over(TTFT, self._ttft_limit_s, model, now_ns, span_ns)

    def ended(self, model: str, now_ns: int, span_ns: int) -> int:
        """Return the number of answers that ended in a span."""
        return round(self._sum([model], now_ns, span_ns).counts["ended"])

    def slow(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return the number of answers that ended in a span, and the number of those that certainly exceeded the
        TPOT.
        """
        return self._over(TPOT, self._tpot_s, model, now_ns, span_ns)

    def _over(self, name: str, limit_s: float, model: str, now_ns: int, span_ns: int) -> Punctuality:
        found = self._sum([model], now_ns, span_ns).histograms.get(name, Counter())
        over = sum(count for (low_s, _), count in found.items() if low_s >= limit_s)
        return Punctuality(round(found.total()), round(over))

    def prompt_lengths(self, model: str, now_ns: int) -> tuple[float, float]:
        """Return the mean prompt length, and 1 as the spread: servers report no lengths of single prompts."""
        counts = self._sum([model], now_ns, SPAN_NS).counts
        return (counts["computed"] / counts["first"] if counts["first"] else 0.0), 1.0

    def mean_output_tokens(self, model: str, now_ns: int) -> float:
        """Return generated tokens divided by finished answers.

        This is near the mean length while as many answers begin as end.
        """
        counts = self._sum([model], now_ns, SPAN_NS).counts
        return counts["generated"] / counts["ended"] if counts["ended"] else 0.0

    def refused_tokens_per_s(self, model: str, now_ns: int, span_ns: int) -> float:
        return 0.0

    def targets_ns(self, model: str) -> tuple[int, int]:
        """Return zeros, since requests carry no targets."""
        return 0, 0

    def requested_targets_ns(self) -> dict[str, tuple[int, int]]:
        return {}

    # Facts that only the servers' histograms contain.

    def tpot_ms(self, model: str, now_ns: int) -> float | None:
        """Return the mean time between tokens over the last two seconds; None if there were none."""
        counts = self._sum([model], now_ns, TPOT_SPAN_NS).counts
        return counts["gaps_s"] / counts["gaps"] * 1000 if counts["gaps"] else None

    def report(
        self, end_ns: int, window_ns: int, awaited: Mapping[str, AwaitedTokens] = MappingProxyType({})
    ) -> RequestsReport:
        """Return the figures of a window in the form of the log of requests."""
        return RequestsReport(
            window_ms=window_ns // 1_000_000,
            as_of_unix_ns=end_ns,
            complete=window_ns <= KEPT_S * SECOND_NS,
            total=self._summary(self._sum(self._seconds, end_ns, window_ns)),
            models=[
                ModelRequests(model, self._summary(self._sum([model], end_ns, window_ns)))
                for model in sorted(self._seconds)
            ],
        )

    def _summary(self, found: _Second) -> RequestSummary:
        counts, of = found.counts, found.histograms
        return RequestSummary(
            requests=round(counts["ended"]),
            outcomes={"ok": round(counts["ended"])},
            prompt_tokens=round(counts["computed"] + counts["cached"]),
            cached_tokens=round(counts["cached"]),
            output_tokens=round(counts["generated"]),
            ttft_s=_percentiles(of.get(TTFT, Counter())),
            tpot_s=_percentiles(of.get(TPOT, Counter())),
            queue_s=_percentiles(of.get(QUEUE_TIME, Counter())),
            ttft_slo=ServiceLevel(0, None, None),
            tpot_slo=ServiceLevel(0, None, None),
            awaited=0,
        )

    def _sum(self, models: Iterable[str], end_ns: int, span_ns: int) -> _Second:
        """Return the sum of the whole seconds that ended in the span, and of the current one."""
        total = _Second(0)
        for model in models:
            for second in reversed(self._seconds.get(model, ())):
                if second.number * SECOND_NS <= end_ns - span_ns:
                    break
                if second.number * SECOND_NS > end_ns:
                    continue
                total.counts.update(second.counts)
                for name, counts in second.histograms.items():
                    total.histograms.setdefault(name, Counter()).update(counts)
        return total


def _add(second: _Second, before: EngineSample, after: EngineSample) -> None:
    old, new = before.reading, after.reading

    def grown(name: str) -> float:
        return max(after.scalars.get(name, 0.0) - before.scalars.get(name, 0.0), 0.0)

    computed = max(new.prompt_tokens - old.prompt_tokens, 0.0)
    # Plain additions: with many servers, Counter.update takes as long as everything else. Its type also allows only
    # integers.
    counts: Any = second.counts
    counts["ended"] += grown("request_success_total")
    counts["computed"] += computed
    counts["cached"] += max(grown("prompt_tokens_total") - computed, 0.0)
    counts["generated"] += max(new.generated_tokens - old.generated_tokens, 0.0)
    counts["first"] += max(new.first_tokens - old.first_tokens, 0.0)
    counts["gaps"] += max(new.token_gaps - old.token_gaps, 0.0)
    counts["gaps_s"] += max(new.token_gaps_s - old.token_gaps_s, 0.0)
    for name in (TTFT, TPOT, QUEUE_TIME):
        known, found = before.histograms.get(name), after.histograms.get(name)
        if known is None or found is None or len(known.counts) != len(found.counts):
            continue
        if found.counts != known.counts:
            _add_difference(second.histograms.setdefault(name, Counter()), known, found)


def _add_difference(counts: Any, before: Buckets, after: Buckets) -> None:
    """Add the number of samples that entered each bucket."""
    low = below = 0.0
    most = after.counts[-1] - before.counts[-1]
    for bound, known, count in zip(after.bounds, before.counts, after.counts, strict=True):
        more = count - known
        if more > below:
            counts[low, bound] += more - below
            below = more
            if more >= most:  # the buckets above contain no more
                break
        low = bound


def percentile(counts: Mapping[Span, float], percent: int) -> float | None:
    """Return a percentile, interpolated within its bucket; the last bucket's lower bound if it has no upper one."""
    rank = sum(counts.values()) * percent / 100
    for (low, high), count in sorted(counts.items()):
        if rank <= count and count:
            return low if high == inf else low + (high - low) * rank / count
        rank -= count
    return None


def _percentiles(counts: Counter[Span]) -> Percentiles:
    ranks: Sequence[float | None] = [percentile(counts, each) for each in (50, 90, 99)]
    return Percentiles(round(counts.total()), *ranks)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
