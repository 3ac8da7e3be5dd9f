"""The number of GPUs that the active models need: sums and mixtures of their counts, the laws of their runs, and
calibration.
"""

from collections.abc import Callable
from math import erfc, lgamma, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

RARE: Final = 1e-3
"""The probability below which models are counted together, as a Poisson variable with their mean size.

By Le Cam's bound this changes no probability by more than half the sum of the squares of their probabilities.
"""
POISSON_TAIL: Final = 1e-12


def gpu_units(gpus: Floats) -> tuple[Whole, float]:
    """Return sizes as integer multiples of a unit, rounded up, and the unit: 1 GPU, 1/2, 1/4 or, at the finest, 1/8."""
    for parts in (1, 2, 4):
        if np.all(np.abs(gpus * parts - np.rint(gpus * parts)) < 1e-9):
            return np.rint(gpus * parts).astype(np.int64), 1 / parts
    return np.ceil(gpus * 8 - 1e-9).astype(np.int64), 1 / 8


def sum_distribution(probability: Floats, units: Whole) -> Floats:
    """Return the distribution of the units of the active models, which are active independently of each other.

    It is Poisson-binomial if all have one unit. `probability` has the shape [cases, models], with one distribution
    per case. The result has the shape [cases, sum of units + 1]. Its last entry also holds the mass beyond the tail
    of rare models.
    """
    cases = probability.shape[0]
    is_rare = probability.max(axis=0, initial=0.0) < RARE
    often = np.flatnonzero(~is_rare)
    rare_mean = probability[:, is_rare] @ np.ones(int(is_rare.sum()))
    rare_units = max(round(float(units[is_rare].mean())), 1) if is_rare.any() else 1
    rare_most = _poisson_most(float(rare_mean.max(initial=0.0)))
    size = int(units[often].sum()) + rare_units * rare_most + 1
    found = np.zeros((cases, size))
    found[:, 0] = 1.0
    top = 1
    for index in often:
        chance, width = probability[:, index, None], int(units[index])
        top += width
        moved = found[:, : top - width] * chance
        found[:, :top] *= 1 - chance
        found[:, width:top] += moved
    return _plus_poisson(found, top, rare_mean, rare_units, rare_most) if rare_most else found


def _poisson_most(mean: float) -> int:
    """Return the number that a Poisson variable of this mean exceeds with a probability below `POISSON_TAIL`."""
    most, term, tail = 0, float(np.exp(-mean)), 1 - float(np.exp(-mean))
    while tail > POISSON_TAIL and most < 1000:
        most += 1
        term *= mean / most
        tail -= term
    return most


def _plus_poisson(found: Floats, top: int, mean: Floats, width: int, most: int) -> Floats:
    total = np.zeros_like(found)
    weight = np.exp(-mean)
    left = np.ones_like(weight)
    for count in range(most + 1):
        share = left if count == most else weight
        total[:, count * width : count * width + top] += found[:, :top] * share[:, None]
        left = np.maximum(left - weight, 0.0)
        weight = weight * mean / (count + 1)
    return total


def quantile(distribution: Floats, level: float) -> int:
    """Return the smallest number that is not exceeded with at least this probability."""
    return not_passed(distribution, 1 - level + 1e-12)


def not_passed(distribution: Floats, miss: float) -> int:
    """Return the smallest number that is exceeded with at most this probability."""
    # Summing from the far end keeps tiny probabilities exact.
    beyond = np.cumsum(distribution[::-1])[::-1]
    found = np.searchsorted(-beyond, -miss, side="left")
    return max(min(int(found), len(distribution)) - 1, 0)


def mean_of(distribution: Floats) -> float:
    return float(distribution @ np.arange(len(distribution)))


SHRINK: Final = 6.0
"""The number of ends in a stretch of time at which a model's own hazard weighs as much as that of all models."""
STRETCHES: Final = 18
LONGEST_S: Final = 7 * 86_400.0


class HazardTable:
    """A piecewise constant hazard per model, over geometrically growing stretches of elapsed time.

    It describes a renewal process of any law, with the usual estimate per stretch: ends over time spent. The last
    stretch has no end. A model's hazard is shrunk towards that of all models, scaled by the model's own pace (Gamma
    prior).
    """

    def __init__(self, shortest_s: float, keep_per_s: float) -> None:
        """Create an empty table.

        `shortest_s` is the end of the first stretch, and `keep_per_s` the decay of evidence per second.
        """
        self.edges_s: Floats = np.concatenate([[0.0], np.geomspace(shortest_s, LONGEST_S, STRETCHES)])
        self._keep_per_s = keep_per_s
        self._ends: Floats = np.zeros((0, STRETCHES + 1))
        self._spent_s: Floats = np.zeros((0, STRETCHES + 1))
        self._hazard: Floats = np.zeros((0, STRETCHES + 1))
        self._summed: Floats = np.zeros((0, STRETCHES + 1))

    def grow(self, models: int) -> None:
        """Add rows up to this number of models."""
        more = models - len(self._ends)
        if more > 0:
            room = np.zeros((more, STRETCHES + 1))
            self._ends = np.concatenate([self._ends, room])
            self._spent_s = np.concatenate([self._spent_s, room])
            self.refresh()

    def forget(self, seconds: float) -> None:
        """Decay all evidence by the elapsed seconds."""
        keep = self._keep_per_s**seconds
        self._ends *= keep
        self._spent_s *= keep

    def learn(self, model: Whole, from_s: Floats, to_s: Floats, ended: Floats) -> None:
        """Add observed spans of elapsed time; `ended` is 1 where the end came at `to_s`, and 0 otherwise."""
        low, high = self.edges_s, np.append(self.edges_s[1:], np.inf)
        spent_s = np.clip(np.minimum(to_s[:, None], high) - np.maximum(from_s[:, None], low), 0.0, None)
        np.add.at(self._spent_s, model, spent_s)
        where = np.searchsorted(self.edges_s, to_s, side="right") - 1
        np.add.at(self._ends, (model, where), ended)

    def refresh(self) -> None:
        """Re-estimate the hazards from all evidence."""
        all_ends, all_spent_s = self._ends.sum(axis=0), self._spent_s.sum(axis=0)
        mean = (all_ends.sum() + 0.5) / (all_spent_s.sum() + self.edges_s[1])
        shared = (all_ends + 0.5) / (all_spent_s + 0.5 / mean)
        expected = self._spent_s @ shared
        pace = (self._ends.sum(axis=1) + SHRINK) / (expected + SHRINK)
        prior = shared[None, :] * pace[:, None]
        self._hazard = (self._ends + SHRINK) / (self._spent_s + SHRINK / prior)
        summed = np.cumsum(self._hazard[:, :-1] * np.diff(self.edges_s), axis=1)
        self._summed = np.concatenate([np.zeros((len(summed), 1)), summed], axis=1)

    def cumulative(self, model: Whole, elapsed_s: Floats) -> Floats:
        """Return the hazard integrated from 0; exp of its negative is the probability of lasting that long."""
        index = np.searchsorted(self.edges_s, elapsed_s, side="right") - 1
        return self._summed[model, index] + self._hazard[model, index] * (elapsed_s - self.edges_s[index])


STEPS: Final = 2400
"""The number of grid points on which the renewal equation is solved."""
REACH: Final = 16.0
"""The end of the grid in mean run times, by which an exponential run has almost surely ended."""

Cdf = Callable[[Floats], Floats]


def poisson_active(rate_per_s: Floats, run_s: Floats) -> Floats:
    """Return the share of time with at least one request in flight, for Poisson arrivals and any run times of that
    mean.

    It is 1 − exp(−λT) (M/G/∞). The sum over models is the expected number of active ones.
    """
    return -np.expm1(-rate_per_s * run_s)


def gamma_cdf(shape: float, at: Floats) -> Floats:
    """Return the cumulative distribution of a gamma distribution of scale 1.

    It sums the series of the incomplete gamma function, whose terms are all positive.
    """
    x = np.clip(at, 0.0, 60.0)
    term = np.full_like(x, 1 / shape)
    total = term.copy()
    for n in range(1, 240):
        term = term * x / (shape + n)
        total += term
    with np.errstate(divide="ignore"):
        found = np.exp(shape * np.log(x) - x - lgamma(shape)) * total
    return np.where(at >= 60.0, 1.0, np.clip(found, 0.0, 1.0))


def renewal_active(gap: Cdf, mean_gap_s: float, run: Cdf, reach_s: float) -> float:
    """Return the share of time with at least one request in flight, for independent gaps and runs (GI/G/∞).

    Suppose the latest request before some time came s earlier. Let h(s) be the probability that neither it nor any
    earlier request is still in flight. Then h(s) = run(s)·∫h(s + x) dgap(x), solved backwards from h = 1 at
    `reach_s`. The idle share is the mean of h over the equilibrium law of the time since the last arrival, whose
    density is (1 − gap)/mean.
    """
    step_s = reach_s / STEPS
    edges: Floats = np.arange(STEPS + 1, dtype=np.float64) * step_s
    middles: Floats = edges[:-1] + step_s / 2
    below = gap(edges + step_s / 2)
    at_zero, weights = float(below[0]), np.diff(below)
    ended = run(middles)
    idle = np.ones(2 * STEPS)
    for index in range(STEPS - 1, -1, -1):
        later = idle[index + 1 : index + 1 + STEPS]
        beyond = 1 - float(below[-1])
        if len(later) < STEPS:
            beyond += float(weights[len(later) :].sum())
        reached = float(weights[: len(later)] @ later) + beyond
        idle[index] = ended[index] * reached / (1 - ended[index] * at_zero)
    surviving = 1 - gap(edges)
    inside = (surviving[:-1] + surviving[1:]) / 2 * step_s / mean_gap_s
    return float(np.clip(inside @ (1 - idle[:STEPS]), 0.0, 1.0))


def gamma_active(rate_per_s: float, gap_cv: float, run_s: float) -> float:
    """Return `renewal_active` for gamma gaps with this coefficient of variation and exponential runs."""
    shape = 1 / (gap_cv * gap_cv)
    scale_s = 1 / (rate_per_s * shape)
    return renewal_active(
        lambda at: gamma_cdf(shape, at / scale_s), 1 / rate_per_s, lambda at: -np.expm1(-at / run_s), REACH * run_s
    )


Bools = NDArray[np.bool_]

SPREADS: Final = (0.1, 0.2, 0.35, 0.6, 1.0)
"""The candidate standard deviations of the factor's logarithm; a model without a factor is a candidate too."""
KEEPS: Final = (0.0, 0.8, 0.95, 0.985, 0.997)
"""The candidate autocorrelations of the logarithm from one window to the next."""
NODES: Final = 15
FACTOR_REACH: Final = 2.8
"""The standard deviations that the grid spans on either side."""
CLEAR: Final = 2.0
"""The nats by which a common factor must predict better than none to be used."""
EVIDENCE_KEEP: Final = 0.98
"""The share of the evidence that is kept from one window to the next."""
MOST_NATS: Final = 10.0
"""The maximum evidence that one window may give for or against a setting."""


class CommonRate:
    """A grid filter, for each candidate setting, of a log-normal factor of mean 1 that reverts to its mean (AR(1)).

    It observes which models were requested in a window, each with its own probability given the factor. So single
    models, however bursty, are no evidence for a common factor.
    """

    def __init__(self) -> None:
        middle = np.linspace(-FACTOR_REACH, FACTOR_REACH, NODES)
        weight = np.exp(-middle * middle / 2)
        weight /= weight.sum()
        self._settings = [(spread, keep) for spread in SPREADS for keep in KEEPS]
        spreads = np.array([spread for spread, _ in self._settings])
        factor = np.exp(spreads[:, None] * middle)
        # Shape [setting, node].
        self._factor = factor / (factor @ weight)[:, None]
        self._step = np.stack([_transition(middle, weight, keep) for _, keep in self._settings])
        self._belief = np.repeat(weight[None, :], len(self._settings), axis=0)
        self._evidence = np.zeros(len(self._settings))

    @property
    def setting(self) -> tuple[float, float] | None:
        """The spread and autocorrelation that predicted best; None if there is no common factor."""
        best = int(self._evidence.argmax())
        return self._settings[best] if self._evidence[best] > CLEAR else None

    def ahead(self) -> tuple[Floats, Floats]:
        """Return the values of the factor in the next window and their probabilities."""
        if self.setting is None:
            return np.ones(1), np.ones(1)
        best = int(self._evidence.argmax())
        belief = self._belief[best]
        kept = belief > 1e-5
        return self._factor[best][kept], belief[kept] / belief[kept].sum()

    def learn(self, hazard: Floats, requested: Floats, counted: Bools) -> float:
        """Learn from a window in which models with these cumulative hazards had this many arrivals.

        `counted` marks models whose arrivals are a Poisson process given the factor, so that their number carries more
        information than their presence. Return the estimate of the factor during the window.
        """
        flat = self._factor.reshape(-1)
        often, whether = hazard[counted], hazard[~counted]
        likely = float(requested[counted].sum()) * np.log(flat) - (flat - 1) * float(often.sum())
        came = (requested[~counted] > 0).astype(np.float64)
        likely += np.log(-np.expm1(-flat[:, None] * whether[None, :])) @ came - flat * float(whether @ (1 - came))
        likely -= float(np.log(-np.expm1(-whether)) @ came - whether @ (1 - came))
        likely = likely.reshape(self._factor.shape)
        most = likely.max(axis=1, keepdims=True)
        weighed = self._belief * np.exp(likely - most)
        total = weighed.sum(axis=1, keepdims=True)
        reported = np.clip(np.log(total[:, 0]) + most[:, 0], -MOST_NATS, MOST_NATS)
        self._evidence = self._evidence * EVIDENCE_KEEP + reported
        after = weighed / total
        best = int(self._evidence.argmax())
        seen = float(self._factor[best] @ after[best]) if self.setting is not None else 1.0
        self._belief = np.einsum("sn,snm->sm", after, self._step)
        return seen


def _transition(middle: Floats, weight: Floats, keep: float) -> Floats:
    """Return the transition matrix of an AR(1) of variance 1 on the nodes, of shape [from, to]."""
    if not keep:
        return np.repeat(weight[None, :], NODES, axis=0)
    spread = np.sqrt(1 - keep * keep)
    chance = np.exp(-(((middle[None, :] - keep * middle[:, None]) / max(spread, 0.2)) ** 2) / 2)
    return np.asarray(chance / chance.sum(axis=1, keepdims=True))


# Each window gives a score: the normal deviate below which the forecast, made before the window, put less than the
# outcome. The next deviate is the recent centre of the outcomes plus a quantile of the scores' distances from it (split
# conformal), with recent scores weighted more. The level of that quantile moves with the recent coverage (adaptive
# conformal inference: Gibbs and Candès 2021). No assumption is made about the forecast.


MAX_SCORES: Final = 2880
"""The maximum number of past scores that are kept: those of the latest windows."""
HALF_LIFE: Final = 600.0
"""The number of windows after which a score weighs half."""
TRUSTED: Final = 60.0
"""The weight, in scores, of the forecast's own quantiles, added as a standard normal to the past scores."""
PRUDENCE: Final = 0.8
"""The aim as a share of the allowed misses, since the misses of a finite log scatter around it."""
STEP: Final = 0.5
"""The share of the allowed misses by which one miss lowers the requested level."""
CENTRE_KEEP: Final = 0.985
"""The decay per window of the scores' centre, with a half-life of 46 windows."""
CENTRE_PRIOR: Final = 10.0
"""The weight, in scores at 0, of the centre's prior."""
CENTRE_REACH: Final = 10.0
"""The bound on a score that enters the centre."""
LEAST: Final = 1e-250
EXTREME: Final = 33.0
"""The deviate of an outcome that the forecast considers less likely than `LEAST`."""
_NORMAL: Final = NormalDist()


def score(distribution: Floats, came: int) -> float:
    """Return the deviate below which the distribution has less than `came`; a larger one covers it."""
    return _deviate(float(distribution[:came].sum()), float(distribution[came:].sum()))


def middle(distribution: Floats, came: int) -> float:
    """Return the deviate of `came` itself, half of whose probability lies on either side.

    It is 0 on average if the forecast is right, however coarse it is.
    """
    half = float(distribution[came]) / 2 if came < len(distribution) else 0.0
    return _deviate(float(distribution[:came].sum()) + half, float(distribution[came + 1 :].sum()) + half)


def _deviate(below: float, above: float) -> float:
    if below <= LEAST:
        return -EXTREME
    if above <= LEAST:
        return EXTREME
    return _NORMAL.inv_cdf(below) if below < above else -_NORMAL.inv_cdf(above)


def normal_miss(deviate: float) -> float:
    """Return the probability beyond a deviate, exact far out in the tail."""
    return erfc(deviate / sqrt(2)) / 2


class Calibrator:
    """A tracker of the deviate that covers outcomes with one confidence.

    The centre of the scores moves faster than their spread. So the centre is tracked with a short memory, and the
    quantile is taken over the residuals.
    """

    def __init__(self, confidence: float) -> None:
        self._miss = PRUDENCE * (1 - confidence)
        self._level_miss = self._miss
        # Scores minus the centre at their time.
        self._residuals: list[float] = []
        self._sum = self._weight = 0.0
        own = ((np.arange(400) + 0.5) / 400).tolist()
        self._own: Floats = np.array([_NORMAL.inv_cdf(each) for each in own])

    @property
    def centre(self) -> float:
        """The recent centre of the outcomes' deviates; 0 if the forecast is right."""
        return self._sum / (self._weight + CENTRE_PRIOR)

    @property
    def deviate(self) -> float:
        """The deviate that the next window's reservation should cover."""
        past = np.array(self._residuals)
        age = np.arange(len(past))[::-1]
        weight = np.concatenate([0.5 ** (age / HALF_LIFE), np.full(len(self._own), TRUSTED / len(self._own))])
        values = np.concatenate([past, self._own])
        order = np.argsort(values)
        above = np.cumsum(weight[order][::-1])[::-1]
        # The coming window's score counts as above all others, as a finite-sample correction.
        allowed = self._level_miss * (weight.sum() + 1) - 1
        index = int(np.searchsorted(-above, -max(allowed, 0.0), side="left"))
        return self.centre + float(values[order][min(index, len(values) - 1)])

    def learn(self, forecast: Floats, came: int, *, covered: bool) -> None:
        """Learn from a window: its forecast, its outcome, and whether the reservation covered it."""
        self._residuals.append(score(forecast, came) - self.centre)
        if len(self._residuals) > MAX_SCORES:
            del self._residuals[0]
        kept = max(min(middle(forecast, came), CENTRE_REACH), -CENTRE_REACH)
        self._sum, self._weight = self._sum * CENTRE_KEEP + kept, self._weight * CENTRE_KEEP + 1
        self._level_miss += STEP * self._miss * (self._miss - (0.0 if covered else 1.0))
        self._level_miss = min(max(self._level_miss, self._miss / 8), self._miss * 2)
