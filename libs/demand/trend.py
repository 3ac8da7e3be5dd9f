"""Which way demand went of late, and whose arrivals, prompts or outputs did it, in words. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from libs.demand.history import ENDED, FIELDS, KNOWN, OUTPUT, PROMPT, REQUESTS, DemandBins, Ints
from libs.policy.forecast.change import Cause, Change, Traffic, causes, find_changes, matters
from libs.policy.forecast.history import DemandHistory, Floats

Phase = Literal["prefill", "decode"]
What = Literal["balance", "prefill", "decode"]
LEAST_SPAN: Final = 3
"""Bins on either side of a change that are looked at, at least."""
MOST_SPAN_S: Final = 86_400.0
"""At most, on either side."""
NAMED: Final = 3
"""Causes that are named."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The last change of a model's balance, or of a phase's level."""

    what: What
    began_s: float
    before: float
    """Of balance, prefill seconds over decode seconds; of a phase, GPU-seconds a second."""
    after: float
    causes: tuple[Cause, ...]
    """Of the phase that changed more, the largest first."""


def last_trends(
    bins: DemandBins, history: DemandHistory, each: tuple[float, float], *, day: int, gpus: bool = True
) -> list[Trend]:
    """The last change of the balance and of each phase that is large enough to be shown, the newest first.

    bins, history: of the same time; each: GPU-seconds of a prompt token and of an output token; day: bins of a day;
    gpus: whether `each` is known, so that levels of phases are busy GPUs.
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
        changes = [shift for shift in shifts if matters(shift, gpus=gpus and what != "balance")]
        if changes:
            last = changes[-1]
            moved = Change(last.began + first, last.found + first, last.before, last.after)
            found.append(_trend(what, moved, bins, history, (prefill_s, decode_s)))
    return sorted(found, key=lambda each: -each.began_s)


def _trend(
    what: What, change: Change, bins: DemandBins, history: DemandHistory, phases: tuple[Floats, Floats]
) -> Trend:
    after = slice(change.began, len(bins))
    step_s = history.step_s
    most = round(MOST_SPAN_S / step_s)
    length = min(max(len(bins) - change.began, LEAST_SPAN), most)
    before = slice(max(change.began - length, 0), change.began)
    phase: Phase = what if what != "balance" else _moved_more(phases, before, after)
    found = causes(traffic(bins, before, step_s), traffic(bins, after, step_s), phase)
    return Trend(what, history.start_s + change.began * step_s, change.before, change.after, tuple(found[:NAMED]))


def _moved_more(phases: tuple[Floats, Floats], before: slice, after: slice) -> Phase:
    moves = []
    for values in phases:
        was, now = np.nanmean(values[before]), np.nanmean(values[after])
        moves.append(abs(float(np.log((now + 1e-9) / (was + 1e-9)))))
    return "prefill" if moves[0] >= moves[1] else "decode"


def traffic(bins: DemandBins, part: slice, step_s: float) -> dict[str, Traffic]:
    """By tenant, over those bins of the part that are heard."""
    seconds = float(bins.heard[part].sum()) * step_s
    found: dict[str, Ints] = {}
    for key, row in bins.rows.items():
        found[key.tenant] = found.get(key.tenant, np.zeros(FIELDS, np.int64)) + row[part][bins.heard[part]].sum(axis=0)
    return {
        tenant: Traffic(
            float(total[REQUESTS]) / seconds,
            float(total[PROMPT]) / max(float(total[KNOWN]), 1.0),
            float(total[OUTPUT]) / max(float(total[ENDED]), 1.0),
        )
        for tenant, total in found.items()
        if seconds
    }
