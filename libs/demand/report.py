"""Forecasts of all series of a model, and their encoding for users and programs."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import numpy as np

from libs.contracts.classes import BATCH_CLASS
from libs.demand.history import DemandBins, Mix, Trend, demand_history, last_trends, mix_of
from libs.policy.capacity import WorkerKind, decode_seconds, hang_together, phases_together, prefill_seconds
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import DAY_S, SERIES, DemandHistory, Floats, SeriesName
from libs.policy.forecast.model import DemandForecaster, HorizonExplanation, has_little_history

# The bound on the stretches of a forecast: a week of hours.
MOST_STRETCHES: Final = 168
# The nearest stretches are all predicted. Of later ones only some are, and the rest are interpolated.
CLOSE: Final = 6
FAR: Final = 48
EXPLAINED_S: Final = (600.0, 3600.0, 10_800.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class DemandOutlook:
    """Forecasts of demand that begin at the end of a history."""

    start_s: float
    """The beginning of the first stretch, in the history's time."""
    step_s: float
    quantiles: dict[SeriesName, Floats]
    """The rates per second at `LEVELS`, of shape [stretches, levels]."""
    little_history: bool
    notes: tuple[str, ...]
    hang: float
    """The correlation of neighbouring stretches of a series."""
    together: float
    """The correlation of the prefill series and the decode series."""
    carried: dict[SeriesName, list[HorizonExplanation]]
    """The explanations of some stretches: the candidate models behind each forecast. Empty if nothing was predicted."""

    def __len__(self) -> int:
        return len(self.quantiles["requests"])


def make_outlook(history: DemandHistory, horizon_s: float) -> DemandOutlook:
    """Predict demand in stretches as long as the history's bins.

    Stretches are several bins long if there would be more than `MOST_STRETCHES`. Raise ValueError if the horizon is
    shorter than a bin.
    """
    times = max(-(-round(horizon_s / history.step_s) // MOST_STRETCHES), 1)
    seen = coarser_history(history, times)
    count = int(horizon_s / seen.step_s + 1e-9)
    if count < 1:
        raise ValueError(f"a horizon of {horizon_s:g} s is shorter than a bin of {seen.step_s:g} s")
    horizons = looked_at(count)
    model = DemandForecaster().fit(seen, horizons)
    found = model.forecast(seen)
    quantiles = {name: fill(horizons, found[name].quantiles, count) for name in SERIES}
    day = max(round(DAY_S / seen.step_s), 1)
    notes = dict.fromkeys((*history.notes, *(note for name in SERIES for note in found[name].notes)))
    hang = hang_together(seen.prefill + seen.decode, day)
    together = phases_together(seen.prefill, seen.decode, day)
    carried = {name: explained(model.explain(name), seen.step_s) for name in SERIES}
    start_s = seen.start_s + len(seen) * seen.step_s
    little = has_little_history(seen)
    return DemandOutlook(start_s, seen.step_s, quantiles, little, tuple(notes), hang, together, carried)


def explained(found: list[HorizonExplanation], step_s: float) -> list[HorizonExplanation]:
    """Return the explanations nearest to 10 minutes and to 1, 3 and 24 hours ahead."""
    near = [min(found, key=lambda each: abs(each.horizon * step_s - ahead_s)) for ahead_s in EXPLAINED_S if found]
    return [each for at, each in enumerate(near) if each not in near[:at]]


def looked_at(count: int) -> tuple[int, ...]:
    """Return the horizons from 1 to `count` that are predicted directly. `count` is always among them."""
    apart = max(count // FAR, 1)
    return tuple(sorted({*range(1, min(CLOSE, count) + 1), *range(count, CLOSE, -apart)}))


def fill(horizons: tuple[int, ...], quantiles: Floats, count: int) -> Floats:
    """Interpolate the quantiles at `horizons` to all horizons, of shape [count, levels]."""
    wanted = np.arange(1, count + 1)
    return np.stack([np.interp(wanted, horizons, quantiles[:, level]) for level in range(len(LEVELS))], axis=1)


def coarser_history(history: DemandHistory, times: int) -> DemandHistory:
    """Return the history in bins that are `times` as long, with the mean of the known bins in each.

    The last bin ends with the history.
    """
    if times == 1:
        return history
    skip = len(history) % times

    def means(values: Floats) -> Floats:
        parts = values[skip:].reshape(-1, times)
        known = np.isfinite(parts)
        count = known.sum(axis=1)
        found = np.where(known, parts, 0.0).sum(axis=1) / np.maximum(count, 1)
        return np.asarray(np.where(2 * count >= times, found, np.nan))

    start_s = history.start_s + skip * history.step_s
    series = (means(history.requests), means(history.prefill), means(history.decode))
    return DemandHistory(history.step_s * times, start_s, *series, notes=history.notes)


BANDS: Final = (("p5", 0.05), ("p10", 0.1), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p90", 0.9), ("p95", 0.95))
MOST_SHOWN: Final = 336
"""The maximum number of bins of history returned with a forecast."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The recorded demand of one model. Its time runs `speed` times as fast as the clock."""

    model: str
    bins: DemandBins
    history: DemandHistory
    mix: Mix | None
    speed: float

    def unix_s(self, seen_s: float) -> float:
        """Convert a time of the history to Unix seconds."""
        return seen_s / self.speed


def model_demand(bins: DemandBins, model: str, speed: float = 1.0) -> ModelDemand:
    """Return the demand of one model, from the first covered bin on.

    Batch lines are left out. They wait for room, so their rate follows the capacity.
    """
    own = {key: row for key, row in bins.rows.items() if key.model == model and key.service_class != BATCH_CLASS}
    return demand_of(DemandBins(bins.bin_ns, bins.first, bins.covered_for(model), own), model, speed)


def demand_of(bins: DemandBins, model: str, speed: float = 1.0) -> ModelDemand:
    """Return the demand of all rows together, from the first covered bin on."""
    known = np.flatnonzero(bins.covered)
    first = int(known[0]) if len(known) else len(bins)
    kept = bins.last(len(bins) - first)
    counts = kept.sums()
    bin_s = bins.bin_ns / 1e9
    seen_s = bin_s * speed
    history = demand_history(counts, kept.covered, start_s=kept.first * seen_s, step_s=seen_s, seconds=bin_s)
    day = max(round(DAY_S / speed / bin_s), 1)
    mix = mix_of(counts[-day:], kept.covered[-day:]) or mix_of(counts, kept.covered)
    return ModelDemand(model, kept, history, mix, speed)


def gpu_seconds_each(kind: WorkerKind, mix: Mix, tpot_s: float) -> tuple[float, float]:
    """Return the GPU-seconds of a prompt token and of an output token."""
    prompt = prefill_seconds(kind, mix.prompt_tokens, mix.cached_share) * kind.gpus
    answer = decode_seconds(kind, mix.prompt_tokens, max(mix.output_tokens, 1.0), tpot_s) * kind.gpus
    return prompt / max(mix.prompt_tokens, 1e-9), answer / max(mix.output_tokens, 1.0)


def forecast_report(
    demand: ModelDemand,
    kind: WorkerKind | None,
    *,
    horizon_s: float,
    tpot_s: float,
    outlook: DemandOutlook | None = None,
) -> dict[str, Any]:
    """Return a forecast as JSON values, with times in Unix seconds. `horizon_s` is by the clock.

    Without a worker kind, GPU-seconds are omitted.
    """
    history, speed = demand.history, demand.speed
    outlook = outlook or make_outlook(history, horizon_s * speed)
    starts = [demand.unix_s(outlook.start_s + at * outlook.step_s) for at in range(len(outlook))]
    each = gpu_seconds_each(kind, demand.mix, tpot_s) if kind is not None and demand.mix is not None else None
    series = {
        name: _bands(outlook.quantiles[name], None if each is None or name == "requests" else each[name == "decode"])
        for name in SERIES
    }
    return {
        "model": demand.model,
        "step_s": _plain(outlook.step_s / speed),
        "starts_unix_s": [_plain(each) for each in starts],
        "series": series,
        "history": _shown(demand),
        "mix": None if demand.mix is None else {name: _plain(getattr(demand.mix, name)) for name in Mix.__slots__},
        "little_history": outlook.little_history,
        "notes": list(outlook.notes) + ([] if each else ["no worker has reported its step times: no GPU-seconds"]),
        "carried": _carried(demand, outlook),
        "trend": trends_in_words(demand, each),
    }


def _carried(demand: ModelDemand, outlook: DemandOutlook) -> list[dict[str, Any]]:
    """Return the candidate models behind the forecast; see `HorizonExplanation`."""
    return [
        {
            "series": name,
            "horizon_s": _plain(each.horizon * outlook.step_s / demand.speed),
            "since_unix_s": _plain(demand.unix_s(each.since_s)),
            "weights": each.weights,
            "errors": {candidate: _plain(error) for candidate, error in each.errors.items()},
        }
        for name in SERIES
        for each in outlook.carried[name]
    ]


def _bands(quantiles: Floats, gpu_s: float | None) -> dict[str, Any]:
    # Medians are not rounded, because those of models add up exactly. A rounded bound of a band may not cross its
    # median.
    median = quantiles[:, LEVELS.index(0.5)].tolist()
    found: dict[str, Any] = {}
    for name, level in BANDS:
        if level == 0.5:
            found[name] = median
            continue
        bound = min if level < 0.5 else max
        rounded = map(_plain, quantiles[:, LEVELS.index(level)])
        pairs = zip(rounded, median, strict=True)
        found[name] = [value if value is None else bound(value, middle) for value, middle in pairs]
    if gpu_s is not None:
        found["gpus"] = {name: [_plain(v * gpu_s) for v in quantiles[:, LEVELS.index(level)]] for name, level in BANDS}
    return found


def _shown(demand: ModelDemand) -> dict[str, Any]:
    history = demand.history
    first = max(len(history) - MOST_SHOWN, 0)
    starts = [_plain(demand.unix_s(history.start_s + at * history.step_s)) for at in range(first, len(history))]
    return {"starts_unix_s": starts, **{name: [_plain(v) for v in history.series(name)[first:]] for name in SERIES}}


def trends_in_words(demand: ModelDemand, each: tuple[float, float] | None) -> list[dict[str, Any]]:
    """Return the latest changes as JSON values. The caller formats times."""
    prompt_s, output_s = each or (1.0, 1.0)
    history = demand.history
    # There may be fewer bins than the history has if a gateway's clock was set back.
    if len(demand.bins) != len(history):
        return []
    trends = last_trends(
        demand.bins,
        history,
        (prompt_s, output_s),
        day=max(round(DAY_S / history.step_s), 1),
        gpus=each is not None,
    )
    return [_trend(each, demand) for each in trends]


def _trend(trend: Trend, demand: ModelDemand) -> dict[str, Any]:
    return {
        "what": trend.what,
        "since_unix_s": _plain(demand.unix_s(trend.began_s)),
        "before": _plain(trend.before),
        "after": _plain(trend.after),
        "causes": [
            {
                "tenant": cause.who,
                "what": cause.what,
                "before": _plain(cause.before),
                "after": _plain(cause.after),
                "tokens_per_s": _plain(cause.tokens_per_s),
            }
            for cause in trend.causes
        ],
    }


def _plain(value: float) -> float | None:
    # Unix times need more than six digits, and JSON has no NaN.
    value = float(value)
    return float(f"{value:.12g}" if value > 1e8 else f"{value:.6g}") if isfinite(value) else None
