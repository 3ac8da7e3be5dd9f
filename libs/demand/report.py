"""Forecasts of demand in the form in which users and programs receive them."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import numpy as np

from libs.contracts.classes import BATCH_CLASS
from libs.demand.history import DemandBins, Mix, demand_history, mix_of
from libs.demand.outlook import DemandOutlook, make_outlook
from libs.demand.trend import Trend, last_trends
from libs.policy.capacity import WorkerKind, decode_seconds, prefill_seconds
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats

BANDS: Final = (("p5", 0.05), ("p10", 0.1), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p90", 0.9), ("p95", 0.95))
MOST_SHOWN: Final = 336
"""The most bins of history shown beside a forecast."""
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The known demand of one model, in a time that runs `speed` times as fast as the clock."""

    model: str
    bins: DemandBins
    history: DemandHistory
    mix: Mix | None
    speed: float

    def unix_s(self, seen_s: float) -> float:
        """Convert a moment of the history's time to Unix seconds."""
        return seen_s / self.speed


def model_demand(bins: DemandBins, model: str, speed: float = 1.0) -> ModelDemand:
    """Return the demand of one model from the first covered bin on.

    Batch lines are left out: they wait for room, so they follow the capacity.
    """
    own = {key: row for key, row in bins.rows.items() if key.model == model and key.service_class != BATCH_CLASS}
    known = np.flatnonzero(bins.heard)
    first = int(known[0]) if len(known) else len(bins)
    kept = DemandBins(bins.bin_ns, bins.first, bins.heard, own).last(len(bins) - first)
    counts = kept.sums()
    bin_s = bins.bin_ns / 1e9
    seen_s = bin_s * speed
    history = demand_history(counts, kept.heard, start_s=kept.first * seen_s, step_s=seen_s, seconds=bin_s)
    day = max(round(DAY_S / speed / bin_s), 1)
    mix = mix_of(counts[-day:], kept.heard[-day:]) or mix_of(counts, kept.heard)
    return ModelDemand(model, kept, history, mix, speed)


def gpu_seconds_each(kind: WorkerKind, mix: Mix, tpot_s: float) -> tuple[float, float]:
    """Return the GPU-seconds of (a prompt token, an output token)."""
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
    """Return a forecast as flat JSON values, with times in Unix seconds and `horizon_s` by the clock.

    Without a kind of worker there are no GPU-seconds.
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
        "little_history": any("little history" in note for note in outlook.notes),
        "notes": list(outlook.notes) + ([] if each else ["no worker has reported its step times: no GPU-seconds"]),
        "carried": _carried(demand, outlook),
        "trend": trends_in_words(demand, each),
    }


def _carried(demand: ModelDemand, outlook: DemandOutlook) -> list[dict[str, Any]]:
    """Return the candidates behind the forecast (see `HorizonExplanation`)."""
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
    found: dict[str, Any] = {name: [_plain(v) for v in quantiles[:, LEVELS.index(level)]] for name, level in BANDS}
    if gpu_s is not None:
        found["gpus"] = {name: [_plain(v * gpu_s) for v in quantiles[:, LEVELS.index(level)]] for name, level in BANDS}
    return found


def _shown(demand: ModelDemand) -> dict[str, Any]:
    history = demand.history
    first = max(len(history) - MOST_SHOWN, 0)
    starts = [_plain(demand.unix_s(history.start_s + at * history.step_s)) for at in range(first, len(history))]
    return {"starts_unix_s": starts, **{name: [_plain(v) for v in history.series(name)[first:]] for name in SERIES}}


def trends_in_words(demand: ModelDemand, each: tuple[float, float] | None) -> list[dict[str, Any]]:
    """Return the last changes in words; the caller formats times."""
    prompt_s, output_s = each or (1.0, 1.0)
    history = demand.history
    # Retried bins may be fewer than the history's grid where its clock was set back.
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
    # Moments need more than six digits, and JSON has no nan.
    value = float(value)
    return float(f"{value:.12g}" if value > 1e8 else f"{value:.6g}") if isfinite(value) else None
