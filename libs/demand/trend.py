"""Recent changes of demand, and the tenants' arrivals, prompts or outputs that caused them, in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final, Literal

import numpy as np

from libs.demand.history import ENDED, FIELDS, KNOWN, OUTPUT, PROMPT, REQUESTS, DemandBins, Ints
from libs.policy.forecast.change import ChangeCause, LevelChange, TrafficRates, causes, find_changes, matters
from libs.policy.forecast.history import DemandHistory, Floats

Phase = Literal["prefill", "decode"]
What = Literal["balance", "prefill", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
LEAST_SPAN: Final = 3
"""The least number of bins examined on either side of a change."""
MOST_SPAN_S: Final = 86_400.0
"""The longest time examined on either side of a change."""
NAMED: Final = 3
"""The most causes named for one change."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The last change of a model's balance or of a phase's level."""

    what: What
    began_s: float
    before: float
    """For the balance, prefill over decode seconds; for a phase, GPU-seconds a second."""
    after: float
    causes: tuple[ChangeCause, ...]
    """The causes of the phase that changed more, the largest first."""


def last_trends(
    bins: DemandBins, history: DemandHistory, each: tuple[float, float], *, day: int, gpus: bool = True
) -> list[Trend]:
    """Return the last visible change of the balance and of each phase, the newest first.

    `bins` and `history` cover the same time. `each` holds the GPU-seconds of a prompt token and of an output token.
    `day` is the number of bins of a day. `gpus` says that `each` is known, so that levels of phases are busy GPUs.
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
    """Return two stretches to compare: the newest bins since a change, a day at most, and as many before it.

    The earlier ones are of the same hours one or more days before, if those are known. Comparing a morning with a
    night would show the daily season instead of the change.
    """
    most = min(day, round(MOST_SPAN_S / step_s))
    length = min(max(end - began, min(LEAST_SPAN, end)), most)
    after = slice(end - length, end)
    back = -(-max(end - began, length) // day) * day
    if end - length - back >= 0:
        return slice(end - length - back, end - back), after
    return slice(max(began - length, 0), began), after


def _levels(what: What, phases: tuple[Floats, Floats], parts: tuple[slice, slice]) -> tuple[float, float]:
    """Return the levels (before, after): a phase's means, or the balance's ratios of sums."""
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
    """Return the traffic of each tenant over the covered bins of the part, with rates by the clock."""
    seconds = float(bins.heard[part].sum()) * bins.bin_ns / 1e9
    found: dict[str, Ints] = {}
    for key, row in bins.rows.items():
        found[key.tenant] = found.get(key.tenant, np.zeros(FIELDS, np.int64)) + row[part][bins.heard[part]].sum(axis=0)
    return {
        tenant: TrafficRates(
            float(total[REQUESTS]) / seconds,
            float(total[PROMPT]) / max(float(total[KNOWN]), 1.0),
            float(total[OUTPUT]) / max(float(total[ENDED]), 1.0),
        )
        for tenant, total in found.items()
        if seconds
    }
