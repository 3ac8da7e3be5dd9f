"""llm-d's predicted-latency routing: an online regression of TTFT and TPOT, and SLO headroom as the score.

Read in llm-d/llm-d-router at commit ebab687 (August 2026): config/charts/routerlib/templates/_config.yaml (the plugins
and their order), config/charts/routerlib/values.yaml (training every 10 s), and under pkg/epp/framework/plugins
scheduling/scorer/latency, scheduling/filter/sloheadroomtier, scheduling/filter/prefixcacheaffinity and
requestcontrol/dataproducer/predictedlatency. The regression is `bayesian_ridge` of latencypredictor/training_server.py
in kubernetes-sigs/gateway-api-inference-extension at commit 0074568, with its features and its factor of 1.28 standard
deviations for the 90th percentile. The chart's own model is XGBoost.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libs.lab.rivals.llm_d import kv_use
from libs.lab.rivals.pools import sequences
from libs.lab.rivals.port import Rival, SeenRequest, SeenWorker
from libs.lab.rivals.splits import DEFAULT_BUDGET_TOKENS, all_mixed, check_budget
from libs.policy.roles import Role

TRAIN_EVERY_NS: Final = 10_000_000_000
FIRST_SAMPLES: Final = 10
"""The minimum number of samples for the first fit."""
MOST_SAMPLES: Final = 5_000
"""The samples kept for each model; the service keeps 500 for each of its buckets of load and prefix."""
DEVIATIONS: Final = 1.28
"""The standard deviations from the mean to the 90th percentile."""
RIDGE: Final = 1e-3
"""The penalty on standardised coefficients, in samples."""

STRICT_AFFINITY, LOOSE_AFFINITY = 0.99, 0.80
"""The shares of the prompt in a worker's cache from which the worker is preferred, before and after the SLO tiers."""
MOST_PENALTY_NS: Final = 5_000_000_000
"""The predicted TTFT that using a cached prefix may cost."""
EXPLORED: Final = 0.01
"""The share of requests sent to workers that are predicted to miss the SLO although others meet it."""
TTFT_WEIGHT, TPOT_WEIGHT = 0.8, 0.2
LEAST_SCORE, MOST_SCORE = 1, 100
ZERO_RANGE_NS: Final = 1.0

Vector = NDArray[np.float64]


class Prediction(NamedTuple):
    """A worker with its predicted headroom; below 0 the prediction misses the SLO."""

    worker: SeenWorker
    ttft_ns: float
    ttft_headroom_ns: float
    tpot_headroom_ns: float

    @property
    def keeps_slo(self) -> bool:
        return self.ttft_headroom_ns >= 0 and self.tpot_headroom_ns >= 0


@dataclass(slots=True)
class OnlineRegression:
    """A linear model of a time over a window of samples, refitted at intervals."""

    _samples: deque[tuple[Vector, float]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    _weights: Vector | None = None
    """Coefficients of the features, then the intercept."""
    _deviation_ns: float = 0.0

    @property
    def ready(self) -> bool:
        return self._weights is not None

    def add(self, features: Vector, time_ns: float) -> None:
        self._samples.append((features, time_ns))

    def fit(self) -> None:
        """Fit the window, if it has enough samples."""
        if len(self._samples) < FIRST_SAMPLES:
            return
        rows = np.array([row for row, _ in self._samples])
        times = np.array([time_ns for _, time_ns in self._samples])
        means, scales = rows.mean(axis=0), rows.std(axis=0)
        scales[scales == 0.0] = 1.0
        scaled = (rows - means) / scales
        penalty = RIDGE * len(times) * np.eye(scaled.shape[1])
        found = np.linalg.solve(scaled.T @ scaled + penalty, scaled.T @ (times - times.mean())) / scales
        self._weights = np.append(found, times.mean() - found @ means)
        self._deviation_ns = float((times - self._mean(rows)).std())

    def predict_ns(self, rows: Vector) -> Vector:
        """Return the 90th percentile for each row of features."""
        found: Vector = np.maximum(self._mean(rows) + DEVIATIONS * self._deviation_ns, 0.0)
        return found

    def _mean(self, rows: Vector) -> Vector:
        assert self._weights is not None
        found: Vector = rows @ self._weights[:-1] + self._weights[-1]
        return found


@dataclass(slots=True)
class LatencyRouter:
    """A router to a worker whose predicted latency leaves the least headroom under the SLO that it meets."""

    most: bool = False
    """True for the most headroom (`headroomSelectionStrategy: most`)."""
    _ttft: OnlineRegression = field(default_factory=OnlineRegression)
    _tpot: OnlineRegression = field(default_factory=OnlineRegression)
    _trained_ns: int = 0
    _sent: dict[int, Vector] = field(default_factory=dict)
    """The features of running requests at the worker that they were sent to, by request number."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return a worker drawn by score. The draw depends only on the request's number."""
        if now_ns - self._trained_ns >= TRAIN_EVERY_NS:
            self._trained_ns = now_ns
            self._ttft.fit()
            self._tpot.fit()
        able = [each for each in workers if each.ready and (each.budget_tokens or each.role == Role.PREFILL)]
        rows = np.array([features(request, each) for each in able])
        if self._ttft.ready and self._tpot.ready:
            scores = self._scores(request, able, rows)
        else:
            scores = composite_scores(request, able)
        at = _drawn([score for _, score in scores], _draw(request.number, 1))
        chosen = scores[at][0]
        self._sent[request.number] = rows[able.index(chosen)]
        return chosen.index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the worker that computed the prompt, or one that decodes with the fewest sequences."""
        pool = [each for each in workers if each.ready and each.role == Role.MIXED]
        here = any(each.index == source for each in pool)
        return source if here else min(pool, key=lambda each: (sequences(each), each.index)).index

    def first_token(self, number: int, ttft_ns: int) -> None:
        if number in self._sent:
            self._ttft.add(self._sent[number], ttft_ns)

    def ended(self, number: int, tpot_ns: float) -> None:
        row = self._sent.pop(number, None)
        if row is not None and tpot_ns:
            self._tpot.add(row, tpot_ns)

    def _scores(self, request: SeenRequest, able: Sequence[SeenWorker], rows: Vector) -> list[tuple[SeenWorker, float]]:
        ttfts, tpots, slo = self._ttft.predict_ns(rows), self._tpot.predict_ns(rows), request.slo
        predictions = [
            Prediction(worker, float(ttft), slo.ttft_ns - float(ttft), slo.tpot_ns - float(tpot))
            for worker, ttft, tpot in zip(able, ttfts, tpots, strict=True)
        ]
        left = near_cache(request, predictions, STRICT_AFFINITY)
        keep, miss = [each for each in left if each.keeps_slo], [each for each in left if not each.keeps_slo]
        if keep and miss:
            left = miss if _draw(request.number, 2) < EXPLORED else keep
        left = near_cache(request, left, LOOSE_AFFINITY)
        return scored(left, most=self.most)


def features(request: SeenRequest, worker: SeenWorker) -> list[float]:
    """Return the features of both models: the worker's load, the prompt's length, and its cached part."""
    cached = request.cached_tokens[worker.index] / request.input_tokens
    return [
        kv_use(worker),
        float(request.input_tokens),
        float(max(worker.prompts - 1, 0) + worker.queued_decodes),
        float(worker.prompts + sequences(worker)),
        cached,
        (1.0 - cached) * request.input_tokens,
        float(worker.prompt_tokens),
    ]


def near_cache(request: SeenRequest, predictions: Sequence[Prediction], threshold: float) -> list[Prediction]:
    """Return the workers that cache this share of the prompt; all workers if these are too slow or there are none."""
    sticky = [
        each for each in predictions if request.cached_tokens[each.worker.index] >= threshold * request.input_tokens
    ]
    others = [each for each in predictions if each not in sticky]
    if not sticky or not others:
        return list(predictions)
    penalty_ns = min(each.ttft_ns for each in sticky) - min(each.ttft_ns for each in others)
    return list(predictions) if penalty_ns > MOST_PENALTY_NS else sticky


def scored(predictions: Sequence[Prediction], *, most: bool = False) -> list[tuple[SeenWorker, float]]:
    """Return the workers with their scores: those that meet the SLO, else idle ones, else those that miss it least."""
    keep = [each for each in predictions if each.keeps_slo]
    if keep:
        return _blended(keep, most=most)
    idle = [each for each in predictions if not each.worker.prompts + sequences(each.worker)]
    tpot_only = [each for each in predictions if each.ttft_headroom_ns >= 0]
    ttft_only = [each for each in predictions if each.tpot_headroom_ns >= 0]
    return _blended(idle or tpot_only or ttft_only or list(predictions), most=False)


def _blended(predictions: Sequence[Prediction], *, most: bool) -> list[tuple[SeenWorker, float]]:
    """Return scores by the headroom of both times, each normalised to the range of these workers."""
    ttfts = [abs(each.ttft_headroom_ns) for each in predictions]
    tpots = [abs(each.tpot_headroom_ns) for each in predictions]
    ttft_range, tpot_range = max(ttfts) - min(ttfts), max(tpots) - min(tpots)
    alpha, beta = TTFT_WEIGHT, TPOT_WEIGHT
    if ttft_range <= ZERO_RANGE_NS < tpot_range:
        alpha, beta = 0.0, 1.0
    elif tpot_range <= ZERO_RANGE_NS < ttft_range:
        alpha, beta = 1.0, 0.0
    found = []
    for each, ttft, tpot in zip(predictions, ttfts, tpots, strict=True):
        ttft_part = (ttft - min(ttfts)) / ttft_range if ttft_range > ZERO_RANGE_NS else 0.5
        tpot_part = (tpot - min(tpots)) / tpot_range if tpot_range > ZERO_RANGE_NS else 0.5
        combined = alpha * ttft_part + beta * tpot_part
        share = combined if most else 1.0 - combined
        found.append((each.worker, float(int(share * (MOST_SCORE - LEAST_SCORE)) + LEAST_SCORE + 1)))
    return found


def composite_scores(request: SeenRequest, able: Sequence[SeenWorker]) -> list[tuple[SeenWorker, float]]:
    """Return the scores without a model: free KV, short queue and cached prefix, with equal weights."""
    queues = [max(each.prompts - 1, 0) + each.queued_decodes for each in able]
    longest = max(queues)
    found = []
    for each, queue in zip(able, queues, strict=True):
        short = (longest - queue) / longest if longest else 1.0
        prefix = request.cached_tokens[each.index] / request.input_tokens
        share = (1.0 - kv_use(each) + short + prefix) / 3.0
        found.append((each, float(round(LEAST_SCORE + (MOST_SCORE - LEAST_SCORE) * share))))
    return found


def _draw(number: int, salt: int) -> float:
    """Return a pseudo-random number in [0, 1) that is always the same for a request."""
    mixed = (number * 2 + salt) * 0x9E3779B97F4A7C15 % (1 << 64)
    mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return (mixed >> 11) / float(1 << 53)


def _drawn(weights: Sequence[float], draw: float) -> int:
    """Return an index chosen by the draw, with a probability in proportion to its weight."""
    left = draw * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1


def llm_d_latency(budget_tokens: int = DEFAULT_BUDGET_TOKENS, *, most: bool = False) -> Rival:
    """Return llm-d's predicted-latency routing over workers that are all mixed with this budget."""
    check_budget(budget_tokens)

    return Rival(
        name=f"llm-d-latency{'-most' if most else ''}:{budget_tokens}",
        source="llm-d/llm-d-router ebab687 (plugins and chart); gateway-api-inference-extension 0074568 (regression)",
        simplified=(
            "The regression is linear (their `bayesian_ridge`, with a fixed penalty), while the chart's is XGBoost; "
            "prompt tokens in flight are a feature of it too, which only their newer models have.",
            "One window of samples takes the place of buckets, and the first fit needs 10 samples, not 100.",
            "Weighted draws depend on the request's number, so that equal runs are equal.",
            "Queues are seen as they are at that moment, not as the last scrape of metrics had them.",
        ),
        first_roles=lambda cluster: all_mixed(cluster, budget_tokens),
        router=lambda _: LatencyRouter(most),
    )
