"""Conversion of recorded bins to the rates, lengths and burstiness that forecasts need, and detection of recent
changes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libs.demand.counts import Counts, DemandKey
from libs.policy.forecast.change import ChangeCause, LevelChange, TrafficRates, causes, find_changes, matters
from libs.policy.forecast.history import DemandHistory, Floats, history_from_rates

Ints = NDArray[np.int64]
FIELDS: Final = len(Counts._fields)
REQUESTS, KNOWN, PROMPT, CACHED, OUTPUT, ENDED, REFUSED = range(FIELDS)
# The mean output length is taken over the fewest of these bins in which `LEAST_ENDED` answers ended, or else over all
# bins.
LENGTH_BINS: Final = (1, 3, 12, 36, 144)
LEAST_ENDED: Final = 30
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DemandBins:
    """Consecutive bins of demand with the counts of every row."""

    bin_ns: int
    first: int
    """The number of the first bin, which is its start divided by `bin_ns`."""
    covered: NDArray[np.bool_]
    """A mask [n] of the bins whose arrivals are known."""
    rows: Mapping[DemandKey, Ints]
    """The counts by model, class and tenant, each of shape [n, fields]."""
    unknown: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Masks [n] by model, of the bins in which only the arrivals of this model are unknown."""

    def __len__(self) -> int:
        return len(self.covered)

    def covered_for(self, model: str) -> NDArray[np.bool_]:
        """Return a mask [n] of the bins in which the model's arrivals are known."""
        unknown = self.unknown.get(model)
        return self.covered if unknown is None else self.covered & ~unknown

    def sums(self, wanted: Callable[[DemandKey], bool] = lambda key: True) -> Ints:
        """Return the counts summed over the rows that satisfy `wanted`, of shape [n, fields]."""
        total = np.zeros((len(self), FIELDS), np.int64)
        for key, row in self.rows.items():
            if wanted(key):
                total += row
        return total

    def last(self, bins: int) -> "DemandBins":
        at = max(len(self) - bins, 0)
        rows = {key: row[at:] for key, row in self.rows.items()}
        unknown = {model: each[at:] for model, each in self.unknown.items()}
        return DemandBins(self.bin_ns, self.first + at, self.covered[at:], rows, unknown)


def demand_history(
    counts: Ints, covered: NDArray[np.bool_], *, start_s: float, step_s: float, seconds: float
) -> DemandHistory:
    """Return the history of bins with counts of shape [n, fields].

    `start_s` and `step_s` are in the history's time, `seconds` is the length of a bin by the clock. The rate of output
    tokens is the rate of requests times the recent mean output length, which counts the tokens of unfinished answers.
    """
    n = len(counts)
    if not n:
        nothing = np.empty(0)
        return DemandHistory(step_s, start_s, nothing, nothing, nothing, ("no demand was reported",))
    rates = counts / seconds
    rates[~covered] = np.nan
    decode = rates[:, KNOWN] * mean_outputs(counts)
    times = start_s + step_s * np.arange(n)
    found = {"requests": rates[:, REQUESTS], "known_requests": rates[:, KNOWN], "prefill": rates[:, PROMPT]}
    return history_from_rates(times, {**found, "decode": decode}, step_s)


def mean_outputs(counts: Ints) -> Floats:
    """Return the mean output length in the bins up to and including each bin, of shape [n].

    Output lengths are assumed to be exponentially distributed. The mean is then the number of generated tokens, those
    of unfinished answers included, divided by the number of ended answers. The data is censored; see Epstein and Sobel
    1953.
    """
    sums = np.concatenate([np.zeros((1, FIELDS), np.int64), np.cumsum(counts, axis=0)])
    ends = np.arange(1, len(counts) + 1)
    found = np.full(len(counts), np.nan)
    for width in LENGTH_BINS:
        span = sums[ends] - sums[np.maximum(ends - width, 0)]
        take = np.isnan(found) & (span[:, ENDED] >= LEAST_ENDED)
        found[take] = span[take, OUTPUT] / span[take, ENDED]
    whole = sums[ends]
    few = np.isnan(found) & (whole[:, ENDED] > 0)
    found[few] = whole[few, OUTPUT] / whole[few, ENDED]
    none = np.isnan(found)  # no answer has ended yet, so the tokens so far are a lower bound
    found[none] = whole[none, OUTPUT] / np.maximum(whole[none, KNOWN], 1)
    return found


@dataclass(frozen=True, slots=True)
class Mix:
    """The mean lengths and the burstiness of requests."""

    prompt_tokens: float
    """The mean number of prompt tokens in a request."""
    output_tokens: float
    cached_share: float
    """The share of prompt tokens that were found cached."""
    dispersion: float
    """The index of dispersion of arrivals per bin, which is 1 for Poisson arrivals."""


def mix_of(counts: Ints, covered: NDArray[np.bool_]) -> Mix | None:
    """Return the mix of all covered bins, or None if they contain no request.

    Burstiness is the Allan factor. It compares neighbouring bins, so slow changes such as the daily season do not
    count.
    """
    known = counts[covered]
    total = known.sum(axis=0)
    if not total[KNOWN]:
        return None
    outputs = total[OUTPUT] / max(total[ENDED], 1)
    cached = min(total[CACHED] / max(total[PROMPT], 1), 1.0)
    return Mix(float(total[PROMPT] / total[KNOWN]), float(outputs), float(cached), dispersion_of(counts, covered))


def dispersion_of(counts: Ints, covered: NDArray[np.bool_]) -> float:
    """Return the Allan factor of arrivals, or 1 if there are fewer than ten pairs of neighbouring bins.

    The Allan factor is half the mean squared difference of neighbouring bins, divided by their mean.
    """
    arrivals = counts[:, REQUESTS].astype(np.float64)
    pairs = covered[1:] & covered[:-1] if len(covered) > 1 else np.zeros(0, np.bool_)
    if pairs.sum() < 10:
        return 1.0
    off = np.diff(arrivals)[pairs]
    mean = ((arrivals[1:] + arrivals[:-1]) / 2)[pairs].mean()
    return float((off * off).mean() / 2 / mean) if mean > 0 else 1.0


def hour_peaks(counts: Ints, covered: NDArray[np.bool_], per_hour: int, per_peak: int) -> Floats:
    """Return the ratio of the busiest stretch to the mean for each covered hour, of shape [hours].

    A stretch has `per_peak` bins.
    """
    hours = len(counts) // per_hour
    if not hours or per_hour < 2 * per_peak:
        return np.ones(1)
    kept = hours * per_hour
    tokens = (counts[-kept:, PROMPT] + counts[-kept:, OUTPUT]).astype(np.float64).reshape(hours, per_hour)
    known = covered[-kept:].reshape(hours, per_hour).all(axis=1) & (tokens.sum(axis=1) > 0)
    parts = tokens[:, : per_hour // per_peak * per_peak].reshape(hours, -1, per_peak).mean(axis=2)
    found = parts[known].max(axis=1) / tokens[known].mean(axis=1)
    return found if len(found) else np.ones(1)


def models_of(keys: Iterable[DemandKey]) -> list[str]:
    """Return the models in these keys, sorted and without duplicates."""
    return sorted({key.model for key in keys})


Phase = Literal["prefill", "decode"]
What = Literal["balance", "prefill", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
LEAST_SPAN: Final = 3
"""The minimum number of bins that are compared on either side of a change."""
MOST_SPAN_S: Final = 86_400.0
"""The maximum time that is compared on either side of a change."""
NAMED: Final = 3
"""The maximum number of causes reported for a change."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The latest change of a model's balance between the phases, or of one phase's level."""

    what: What
    began_s: float
    before: float
    """The level before the change.

    It is prefill over decode seconds for the balance, and GPU-seconds per second for a phase.
    """
    after: float
    causes: tuple[ChangeCause, ...]
    """The causes of the phase that changed more, largest first."""


def last_trends(
    bins: DemandBins, history: DemandHistory, each: tuple[float, float], *, day: int, gpus: bool = True
) -> list[Trend]:
    """Return the latest visible change of the balance and of each phase, the latest first.

    `bins` and `history` cover the same time. `each` contains the GPU-seconds of a prompt token and of an output token.
    `day` is the number of bins in a day. `gpus` means that `each` is known, so that the levels of phases are busy GPUs.
    """
    prefill_s, decode_s = history.prefill * each[0], history.decode * each[1]
    found: list[Trend] = []
    tiny = 1e-9
    with np.errstate(divide="ignore", invalid="ignore"):
        balance = np.where(decode_s > tiny, prefill_s / np.maximum(decode_s, tiny), np.nan)
    looked: tuple[tuple[What, Floats], ...] = (("balance", balance), ("prefill", prefill_s), ("decode", decode_s))
    for what, values in looked:
        if not np.isfinite(values).any():
            continue
        first = int(np.isfinite(values).argmax())
        expected = None
        if what != "balance" and len(values) - first > 2 * day:
            expected = np.concatenate([values[first : first + day], values[first:-day]])
        shifts = find_changes(values[first:], history.step_s, expected)
        shown = gpus and what != "balance"
        for shift in reversed(shifts):
            began = shift.began + first
            before, after = spans(began, len(values), day, history.step_s)
            levels = _levels(what, (prefill_s, decode_s), (before, after))
            if matters(LevelChange(began, shift.found + first, *levels), gpus=shown):
                began_s = history.start_s + began * history.step_s
                found.append(_trend(what, began_s, levels, bins, (before, after)))
                break
    return sorted(found, key=lambda each: -each.began_s)


def spans(began: int, end: int, day: int, step_s: float) -> tuple[slice, slice]:
    """Return the stretches before and after a change that are compared.

    The later one consists of the latest bins since the change, at most a day of them. The earlier one has the same
    length. If possible, it covers the same hours of a previous day, because otherwise the daily season would look like
    a change.
    """
    most = min(day, round(MOST_SPAN_S / step_s))
    length = min(max(end - began, min(LEAST_SPAN, end)), most)
    after = slice(end - length, end)
    back = -(-max(end - began, length) // day) * day
    if end - length - back >= 0:
        return slice(end - length - back, end - back), after
    return slice(max(began - length, 0), began), after


def _levels(what: What, phases: tuple[Floats, Floats], parts: tuple[slice, slice]) -> tuple[float, float]:
    """Return the levels before and after a change.

    The level of a phase is its mean. The level of the balance is the ratio of the sums.
    """
    prefill_s, decode_s = phases
    found = []
    for part in parts:
        known = np.isfinite(prefill_s[part]) & np.isfinite(decode_s[part])
        sums = float(prefill_s[part][known].sum()), float(decode_s[part][known].sum())
        if what == "balance":
            found.append(sums[0] / sums[1] if sums[1] > 0 else 0.0)
        else:
            found.append(sums[PHASES.index(what)] / max(int(known.sum()), 1))
    return found[0], found[1]


def _trend(
    what: What, began_s: float, levels: tuple[float, float], bins: DemandBins, parts: tuple[slice, slice]
) -> Trend:
    before, after = (traffic(bins, part) for part in parts)
    phase: Phase = what if what != "balance" else _moved_more(before, after)
    return Trend(what, began_s, *levels, tuple(causes(before, after, phase)[:NAMED]))


def _moved_more(before: Mapping[str, TrafficRates], after: Mapping[str, TrafficRates]) -> Phase:
    def tokens(side: Mapping[str, TrafficRates], phase: Phase) -> float:
        lengths = (
            (each.prompt_tokens, each.output_tokens)[PHASES.index(phase)] * each.requests for each in side.values()
        )
        return float(sum(lengths))

    moves = [abs(log((tokens(after, phase) + 1e-9) / (tokens(before, phase) + 1e-9))) for phase in PHASES]
    return PHASES[0] if moves[0] >= moves[1] else PHASES[1]


def traffic(bins: DemandBins, part: slice) -> dict[str, TrafficRates]:
    """Return the traffic of each tenant in the covered bins of a stretch, with rates by the clock."""
    seconds = float(bins.covered[part].sum()) * bins.bin_ns / 1e9
    found: dict[str, Ints] = {}
    for key, row in bins.rows.items():
        found[key.tenant] = found.get(key.tenant, np.zeros(FIELDS, np.int64)) + row[part][bins.covered[part]].sum(
            axis=0
        )
    return {
        tenant: TrafficRates(
            float(total[REQUESTS]) / seconds,
            float(total[PROMPT]) / max(float(total[KNOWN]), 1.0),
            float(total[OUTPUT]) / max(float(total[ENDED]), 1.0),
        )
        for tenant, total in found.items()
        if seconds
    }
