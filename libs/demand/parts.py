"""Forecasts of all models together and of parts: single models, or a model's tenants or classes.

The medians of the parts add up to the median of the total.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from libs.contracts.classes import BATCH_CLASS, DEFAULT_CLASS
from libs.demand.counts import OTHER, DemandKey
from libs.demand.history import FIELDS, REQUESTS, DemandBins, Ints
from libs.demand.report import DemandOutlook, demand_of, make_outlook
from libs.policy.forecast.history import SERIES, Floats, SeriesName
from libs.policy.forecast.reconcile import MEDIAN, reconcile, share_out

By = Literal["model", "tenant", "class"]
MOST_PARTS: Final = 6
"""The maximum number of parts that are predicted separately. The smallest ones are predicted together as `OTHER`."""
RANKED_BINS: Final = 96
"""The number of latest bins whose requests determine the largest parts: a day of quarter hours."""
MOST_MISSING: Final = 0.1
"""The share of requests that may be unknown in a bin whose sum is treated as known."""


@dataclass(frozen=True, slots=True)
class FleetOutlook:
    """Forecasts of all models together and of the largest ones."""

    bins: DemandBins
    horizon_s: float
    """The length of the predicted time by the clock."""
    speed: float
    total: DemandOutlook
    models: Mapping[str, DemandOutlook]
    """The forecasts of the largest models. `OTHER` stands for the rest if there are more than `MOST_PARTS` models."""

    def model(self, model: str) -> DemandOutlook:
        """Return the forecast of a model. A model that is not among the largest gets a share of `OTHER`'s forecast."""
        pooled = len({key.model for key in self.bins.rows}) > MOST_PARTS
        if model in self.models and not (pooled and model == OTHER):
            return self.models[model]
        rest = _of(self.bins, lambda key: key.model not in self.models and key.model != model)
        found = [self._outlook(bins) for bins in (_only(self.bins, model), rest)]
        return _shared(self.models[OTHER], dict(zip(("own", "rest"), found, strict=True)))["own"]

    def parts(self, model: str, by: By) -> tuple[DemandOutlook, dict[str, DemandOutlook]]:
        """Return the forecast of a total and those of its parts.

        The parts are all models, or the tenants or classes of `model`.
        """
        if by == "model":
            return self.total, dict(self.models)
        total = self.model(model)
        split = _split(_only(self.bins, model), by)
        if len(split) == 1:
            return total, dict.fromkeys(split, total)
        return total, _shared(total, {name: self._outlook(bins) for name, bins in split.items()})

    def _outlook(self, bins: DemandBins) -> DemandOutlook:
        return _outlook(bins, self.horizon_s, self.speed)


def fleet_outlook(bins: DemandBins, horizon_s: float, speed: float) -> FleetOutlook:
    """Predict the demand of all models, without batch lines. `horizon_s` is by the clock.

    Raise ValueError if the horizon is shorter than a bin.
    """
    online = _online(bins)
    split = _split(online, "model")
    total = _outlook(_part(online, online.rows), horizon_s, speed)
    if len(split) < 2:
        return FleetOutlook(online, horizon_s, speed, total, dict.fromkeys(split, total))
    models = {name: _outlook(part, horizon_s, speed) for name, part in split.items()}
    agreed = {series: reconcile(total.quantiles[series], _stacked(models, series)) for series in SERIES}
    total = replace(total, quantiles={series: own for series, (own, _) in agreed.items()})
    models = _with_quantiles(models, {series: shares for series, (_, shares) in agreed.items()})
    return FleetOutlook(online, horizon_s, speed, total, models)


def parts_json(by: By, total: DemandOutlook, parts: Mapping[str, DemandOutlook]) -> dict[str, Any]:
    """Encode the medians of a total and its parts, the largest part first. The parts add up to the total exactly."""
    order = sorted(parts, key=lambda name: -float(parts[name].quantiles["requests"][:, MEDIAN].sum()))
    return {"by": by, "total": _medians(total), "each": {name: _medians(parts[name]) for name in order}}


def _medians(outlook: DemandOutlook) -> dict[SeriesName, list[float]]:
    # Not rounded, because rounded medians would not add up.
    return {name: outlook.quantiles[name][:, MEDIAN].tolist() for name in SERIES}


def _shared(total: DemandOutlook, parts: Mapping[str, DemandOutlook]) -> dict[str, DemandOutlook]:
    shares = {series: share_out(total.quantiles[series], _stacked(parts, series)) for series in SERIES}
    return _with_quantiles(parts, shares)


def _stacked(parts: Mapping[str, DemandOutlook], series: SeriesName) -> Floats:
    """Return the quantiles of one series, of shape [parts, horizons, levels]."""
    return np.stack([each.quantiles[series] for each in parts.values()])


def _with_quantiles(
    parts: Mapping[str, DemandOutlook], stacked: Mapping[SeriesName, Floats]
) -> dict[str, DemandOutlook]:
    return {
        name: replace(each, quantiles={series: quantiles[at] for series, quantiles in stacked.items()})
        for at, (name, each) in enumerate(parts.items())
    }


def _outlook(bins: DemandBins, horizon_s: float, speed: float) -> DemandOutlook:
    return make_outlook(demand_of(bins, "", speed).history, horizon_s * speed)


def _of(bins: DemandBins, wanted: Callable[[DemandKey], bool]) -> DemandBins:
    return _part(bins, {key: row for key, row in bins.rows.items() if wanted(key)})


def _part(bins: DemandBins, rows: Mapping[DemandKey, Ints]) -> DemandBins:
    """Return the bins of these rows.

    A bin is covered if at most `MOST_MISSING` of the rows' usual requests are unknown in it.
    """
    requests: dict[str, Ints] = {}
    for key, row in rows.items():
        requests[key.model] = requests.get(key.model, np.zeros(len(bins), np.int64)) + row[:, REQUESTS]
    whole, missing = 0.0, np.zeros(len(bins))
    for model, counts in requests.items():
        known = bins.covered_for(model)
        usual = float(counts[known].mean()) if known.any() else 0.0
        whole += usual
        missing += usual * (bins.covered & ~known)
    return replace(bins, covered=bins.covered & (missing <= MOST_MISSING * whole), rows=rows)


def _only(bins: DemandBins, model: str) -> DemandBins:
    return _of(bins, lambda key: key.model == model)


def _split(bins: DemandBins, by: By) -> dict[str, DemandBins]:
    """Return the bins of each of the largest parts by requests. All other parts are joined as `OTHER`."""

    def name(key: DemandKey) -> str:
        return key.model if by == "model" else key.tenant if by == "tenant" else key.service_class

    requests: dict[str, int] = {}
    for key, row in bins.rows.items():
        requests[name(key)] = requests.get(name(key), 0) + int(row[-RANKED_BINS:, REQUESTS].sum())
    order = sorted(requests, key=lambda each: (each == OTHER, -requests[each], each))
    kept = order if len(order) <= MOST_PARTS else order[: MOST_PARTS - 1]
    found: dict[str, dict[DemandKey, Ints]] = {each: {} for each in kept}
    for key, row in bins.rows.items():
        found.setdefault(name(key) if name(key) in kept else OTHER, {})[key] = row
    return {each: _part(bins, rows) for each, rows in found.items()}


def _online(bins: DemandBins) -> DemandBins:
    """Return the bins without batch lines. A model that has only batch lines remains, without demand."""
    rows = {key: row for key, row in bins.rows.items() if key.service_class != BATCH_CLASS}
    for model in {key.model for key in bins.rows} - {key.model for key in rows}:
        rows[DemandKey(model, DEFAULT_CLASS, OTHER)] = np.zeros((len(bins), FIELDS), np.int64)
    return replace(bins, rows=rows)
