"""Generated logs of many models after Aegaeon's recipe: rare requests, in bursts, by time of day, or with a common
cause.

Aegaeon (SOSP 2025, section 2.2) has 100 models with 0.037 requests/s each and runs of 16.79 s. Burstiness, seasons
and common causes are additions.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.models.usage import Floats, UsageLog, Whole
from libs.lab.traces.draws import check_count
from libs.lab.traces.generate import Parameter, parse_spec

DAY_S: Final = 86_400.0
MAX_SECONDS: Final = 31 * DAY_S
MAX_MODELS: Final = 2000

_COMMON: Final = (
    Parameter("models", 100, 1, MAX_MODELS, "how many there are"),
    Parameter("rate", 0.037, 1e-6, 100, "requests a second of a model, on average over models and time"),
    Parameter("exec", 16.79, 0.01, 86_400, "mean seconds that a request runs, exponential"),
    Parameter("seconds", DAY_S, 60, MAX_SECONDS, "length"),
    Parameter("zipf", 0, 0, 3, "exponent by which rates fall from model to model; 0: all alike"),
    Parameter("sizes", 0, 0, 1, "share of models that need 2 GPUs, half of them 4; the others need 1"),
)
_CV: Final = Parameter("cv", 2, 0.1, 16, "coefficient of variation of a model's gaps; 1 is Poisson")
_SWING: Final = Parameter("swing", 0.6, 0, 1, "the rate is 1 ± this over a day")
_SPREAD: Final = Parameter("spread", 1, 0, 12, "hours by which models' peaks differ, as a standard deviation")
_CORRELATION: Final = Parameter(
    "correlation", 0.2, 0, 0.9, "of two models' numbers of requests in a minute, where their rates are the mean"
)
_LASTS: Final = Parameter("lasts", 1200, 1, DAY_S, "seconds after which the common rate has forgotten 63 % of itself")
_OWN: Final = Parameter("own", 0.5, 0, 1, "share of requests that come by themselves and not at a shock")

KINDS: Final[Mapping[str, Sequence[Parameter]]] = MappingProxyType(
    {
        "poisson": _COMMON,
        "gamma": (*_COMMON, _CV),
        "daily": (*_COMMON, _CV, _SWING, _SPREAD),
        "surge": (*_COMMON, _CV, _CORRELATION, _LASTS),
        "shock": (*_COMMON, _CORRELATION, _OWN),
        "all": (*_COMMON, _CV, _SWING, _SPREAD, _CORRELATION, _LASTS),
    }
)
"""Parameters of each kind of log.

- surge: one slowly moving factor on all rates.
- shock: at common moments each model is requested with one probability (Marshall-Olkin).
- all: gamma gaps, a day and a surge.
"""

STEP_S: Final = 10.0
"""The time between two values of a varying rate."""
DISPERSION_TICKS: Final = 50_000.0
"""The number of arrivals over which a law's index of dispersion is measured."""


def generate_usage(spec: str, *, seed: int) -> UsageLog:
    """Return the log described by a spec such as `gamma:models=100,cv=4,seconds=86400`. Raise InvalidRequest.

    Varying rates change the clock of a model's gaps, so that gamma gaps stay as bursty in a busy hour as in a calm
    one.
    """
    kind, values = parse_spec(spec, KINDS)
    count, seconds = round(values["models"]), values["seconds"]
    check_count(values["rate"] * count * seconds)
    rng, shared, sizes = (np.random.default_rng([seed, place]) for place in range(3))
    rates = _rates(values["rate"], count, values["zipf"])
    if kind == "shock":
        t_s, model = _shocks(rng, shared, rates, values)
    else:
        t_s, model = _renewals(rng, shared, rates, values)
    if not len(t_s):
        raise InvalidRequest(f"{quoted(spec)} with seed {seed} gives no request: ask for a higher rate or more seconds")
    order = np.argsort(t_s, kind="stable")
    t_s, model = np.round(t_s[order], 3), model[order]
    exec_s = np.round(rng.exponential(values["exec"], len(t_s)), 3)
    digits = len(str(count - 1))
    names = [f"model-{place:0{digits}}" for place in range(count)]
    return UsageLog(spec, t_s, model, exec_s, names, _gpus(sizes, count, values["sizes"]))


def _rates(mean: float, count: int, zipf: float) -> Floats:
    weight = np.arange(1, count + 1, dtype=np.float64) ** -zipf
    return np.asarray(mean * count * weight / weight.sum())


def _gpus(rng: np.random.Generator, count: int, share: float) -> Floats:
    gpus = np.ones(count)
    larger = rng.permutation(count)[: round(share * count)]
    gpus[larger] = 2.0
    gpus[larger[: len(larger) // 2]] = 4.0
    return gpus


def _renewals(
    rng: np.random.Generator, shared: np.random.Generator, rates: Floats, values: Mapping[str, float]
) -> tuple[Floats, Whole]:
    seconds = values["seconds"]
    edges = np.append(np.arange(0.0, seconds, STEP_S), seconds)
    common = _surge(shared, values, len(edges) - 1)
    spread_s = values.get("spread", 0.0) * 3600
    phases = shared.normal(0.0, spread_s, len(rates)) if spread_s else np.zeros(len(rates))
    parts, owners = [], []
    for place, rate in enumerate(rates.tolist()):
        swing = values.get("swing", 0.0) * np.cos(2 * np.pi * (edges[:-1] - DAY_S / 2 - phases[place]) / DAY_S)
        clock = np.append(0.0, np.cumsum(rate * common * (1 + swing) * np.diff(edges)))
        ticks = _gamma_ticks(rng, values.get("cv", 1.0), float(clock[-1]))
        parts.append(np.interp(ticks, clock, edges))
        owners.append(np.full(len(ticks), place))
    return np.concatenate(parts), np.concatenate(owners)


def _gamma_ticks(rng: np.random.Generator, cv: float, until: float) -> Floats:
    """Draw a renewal process whose gaps have mean 1, starting stationary because a long run-in is discarded."""
    shape, run_in = 1 / (cv * cv), 20 * max(cv * cv, 1.0)
    parts, end = [], 0.0
    while end < until + run_in:
        part = end + np.cumsum(rng.gamma(shape, 1 / shape, int(until + run_in) + 100))
        parts.append(part)
        end = float(part[-1])
    ticks = np.concatenate(parts) - run_in
    return ticks[(ticks >= 0) & (ticks < until)]


def _surge(rng: np.random.Generator, values: Mapping[str, float], steps: int) -> Floats:
    """Return a mean-reverting log-normal factor of mean 1, or ones.

    With μ requests a minute and an index of dispersion d of one model's own gaps, a factor of variance v gives two
    models' counts in a minute the covariance μ²·v and the variance d·μ + μ²·v. A correlation of c therefore needs v
    = c·d/((1 − c)·μ).
    """
    correlation = values.get("correlation", 0.0)
    if not correlation:
        return np.ones(steps)
    mean = values["rate"] * 60
    variance = correlation * _dispersion(rng, values.get("cv", 1.0), mean) / ((1 - correlation) * mean)
    log_variance = float(np.log1p(variance))
    keep = float(np.exp(-STEP_S / values["lasts"]))
    noise = rng.normal(0.0, float(np.sqrt(log_variance * (1 - keep * keep))), steps)
    level = float(rng.normal(0.0, float(np.sqrt(log_variance))))
    logs = np.empty(steps)
    for step, shift in enumerate(noise.tolist()):
        level = keep * level + shift
        logs[step] = level
    return np.exp(logs - log_variance / 2)


def _dispersion(rng: np.random.Generator, cv: float, mean: float) -> float:
    """Return the index of dispersion of gamma arrivals, counted in stretches that hold `mean` of them."""
    ticks = _gamma_ticks(rng, cv, DISPERSION_TICKS)
    counts = np.histogram(ticks, np.arange(0.0, DISPERSION_TICKS, mean))[0]
    return float(counts.var() / counts.mean()) if cv != 1 else 1.0


def _shocks(
    rng: np.random.Generator, shared: np.random.Generator, rates: Floats, values: Mapping[str, float]
) -> tuple[Floats, Whole]:
    """Draw own requests, and common moments at which each model is requested with q = correlation/(1 − own).

    The covariance is E[S]·q², the variance that of a Poisson count, and E[S]·q the share that is not the model's
    own.
    """
    own, seconds = values["own"], values["seconds"]
    chance = values["correlation"] / (1 - own) if own < 1 else 2.0
    if not 0 <= chance <= 1:
        raise InvalidRequest("correlation has to be at most 1 − own: what comes at shocks is all that models share")
    parts, owners = [], []
    for place, rate in enumerate(rates.tolist()):
        mine = rate * (own if chance else 1.0)
        drawn = rng.uniform(0, seconds, int(rng.poisson(mine * seconds)))
        parts.append(drawn)
        owners.append(np.full(len(drawn), place))
    if chance:
        mean = float(rates.mean())
        moments = shared.uniform(0, seconds, int(shared.poisson(mean * (1 - own) / chance * seconds)))
        for place, rate in enumerate(rates.tolist()):
            hit = moments[rng.random(len(moments)) < min(chance * rate / mean, 1.0)]
            parts.append(hit)
            owners.append(np.full(len(hit), place))
    return np.concatenate(parts), np.concatenate(owners)
