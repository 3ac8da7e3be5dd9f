"""The cost of rules for keeping models loaded on a usage log: idle GPU time and cold starts.

The rivals are keep-alives; the hybrid histogram policy of Shahrad et al. (Serverless in the Wild, ATC 2020, section
4); and unloading at the end of the last request, as switching between requests does. For idle times beyond the
histogram, the ARIMA model of Shahrad et al. is replaced by their plain keep-alive.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.lab.models.usage import Floats, UsageLog, Whole, spells
from libs.policy.reserve.arrivals import ArrivalLaws, WindowArrivals
from libs.policy.reserve.following import ModelPool, choose, worth_of

HISTOGRAM_BIN_S: Final = 60.0
HISTOGRAM_BINS: Final = 240
HEAD, TAIL, MARGIN = 0.05, 0.99, 0.10
"""Settings published with the policy: 1-minute bins over four hours, percentiles, and a margin on either side."""
LEAST_CV: Final = 2.0
"""The coefficient of variation of bin counts below which the histogram is not considered representative."""
FALLBACK_S: Final = 600.0
AHEAD: Final = np.geomspace(0.1, 60.0, 14)
"""The candidate times until unloading, in units of the cold start's cost."""
REFRESH_TICKS: Final = 20


@dataclass(slots=True)
class RuleResult:
    """The totals of a rule, counted from a given moment on."""

    rule: str
    idle_gpu_s: float = 0.0
    """GPU time held while no request was in flight, loading included."""
    cold_starts: int = 0
    loads: int = 0


@dataclass(frozen=True, slots=True)
class KeepWindow:
    """The plan after a model's last request has ended.

    The model is unloaded at once if `load_after_s` is more than 0, loaded again at that time, and unloaded for good
    at `until_s`.
    """

    load_after_s: float
    until_s: float


Rule = Callable[[list[float]], KeepWindow]
"""Return the plan for a model, given its idle times so far with the oldest first."""


def keep_for(seconds: float) -> Rule:
    """Return a rule that keeps a model loaded for a fixed time."""
    return lambda idle_s: KeepWindow(0.0, seconds)


def hybrid_histogram(idle_s: list[float]) -> KeepWindow:
    """Apply the policy of Shahrad et al. as described in the module."""
    bins = np.minimum(np.array(idle_s) / HISTOGRAM_BIN_S, HISTOGRAM_BINS).astype(np.int64)
    counts = np.bincount(bins, minlength=HISTOGRAM_BINS + 1)[:HISTOGRAM_BINS]
    inside = int(counts.sum())
    if inside < len(idle_s) / 2 or not inside or counts.std() / counts.mean() < LEAST_CV:
        return KeepWindow(0.0, FALLBACK_S)
    share = np.cumsum(counts) / inside
    head = int(np.searchsorted(share, HEAD)) * HISTOGRAM_BIN_S * (1 - MARGIN)
    tail = (int(np.searchsorted(share, TAIL)) + 1) * HISTOGRAM_BIN_S * (1 + MARGIN)
    return KeepWindow(head, tail)


def replay_rule(log: UsageLog, name: str, rule: Rule, *, from_s: float, load_s: float) -> RuleResult:
    """Replay each model by itself in continuous time."""
    kept = RuleResult(name)
    begin_s, end_s, model = spells(log)
    order = np.lexsort((begin_s, model))
    begin_s, end_s, model = begin_s[order], end_s[order], model[order]
    idle_s: list[float] = []
    for place in range(len(model)):
        gpus = float(log.gpus[model[place]])
        if not place or model[place] != model[place - 1]:
            idle_s = []
            if begin_s[place] >= from_s:
                kept.cold_starts, kept.loads = kept.cold_starts + 1, kept.loads + 1
                kept.idle_gpu_s += load_s * gpus
        else:
            free_s = float(end_s[place - 1])
            gap_s = float(begin_s[place]) - free_s
            _one_gap(kept, rule(idle_s), gap_s, from_s=from_s - free_s, gpus=gpus, load_s=load_s)
            idle_s.append(gap_s)
        if place + 1 == len(model) or model[place + 1] != model[place]:
            window, free_s = rule(idle_s), float(end_s[place])
            held_s = min(log.end_s - free_s, window.until_s) - max(window.load_after_s, from_s - free_s)
            kept.idle_gpu_s += gpus * max(held_s, 0.0)
    return kept


def _one_gap(kept: RuleResult, window: KeepWindow, gap_s: float, *, from_s: float, gpus: float, load_s: float) -> None:
    """Add one idle time between two requests; the part before `from_s` (from its beginning) does not count."""
    is_reloaded = window.load_after_s > 0
    held_s = max(min(gap_s, window.until_s) - max(window.load_after_s, from_s), 0.0)
    is_cold = gap_s >= from_s and (gap_s > window.until_s or (is_reloaded and gap_s < window.load_after_s))
    loads = int(is_cold) + int(is_reloaded and gap_s >= window.load_after_s >= from_s)
    kept.idle_gpu_s += gpus * (held_s + loads * load_s)
    kept.cold_starts += int(is_cold)
    kept.loads += loads


def replay_worth(
    log: UsageLog, cold_cost_gpu_s: float, *, tick_s: float, from_s: float, load_s: float, room_gpus: float = np.inf
) -> RuleResult:
    """Replay Fulcrum's rule, which decides at every tick from the learned laws of arrival.

    A request for an unloaded model loads it regardless of the room and counts as a cold start.
    """
    kept = RuleResult(f"worth at {cold_cost_gpu_s:g} GPU-s")
    laws, ahead_s = ArrivalLaws(max(tick_s / 8, 0.5)), AHEAD * cold_cost_gpu_s
    loaded = np.zeros(0, dtype=bool)
    for tick in _ticks(log, tick_s):
        new = len(tick.gpus) - len(loaded)
        loaded = np.append(loaded, np.zeros(new, dtype=bool))
        counts = tick.begin_s >= from_s
        requested = np.unique(tick.arrivals.model)
        cold = requested[~loaded[requested]]
        held_s = np.where(loaded, tick_s, 0.0)
        first_s = np.full(len(loaded), np.inf)
        np.minimum.at(first_s, tick.arrivals.model, tick.arrivals.t_s)
        held_s[cold] = tick.begin_s + tick_s - first_s[cold]
        if counts:
            kept.cold_starts, kept.loads = kept.cold_starts + len(cold), kept.loads + len(cold)
            idle_s = np.maximum(held_s - tick.busy_s, 0.0)
            kept.idle_gpu_s += float(tick.gpus @ idle_s) + load_s * float(tick.gpus[cold].sum())
        loaded[requested] = True
        laws.grow(len(tick.gpus), tick.begin_s)
        laws.learn(tick.begin_s, tick.begin_s + tick_s, tick.arrivals, 1.0)
        if tick.number % REFRESH_TICKS == 0 or new:
            laws.refresh()
        if not len(loaded):
            continue
        every = laws.hazards(tick.begin_s + tick_s, ahead_s)
        hazard = every[laws.chosen, :, np.arange(len(loaded))].T
        worth = worth_of(hazard, ahead_s, tick.gpus, cold_cost_gpu_s, np.where(loaded, 0.0, load_s))
        chosen = choose(
            ModelPool(tick.gpus, loaded, tick.busy_at_end, np.zeros(len(loaded), dtype=bool), worth), room_gpus
        )
        fresh = chosen & ~loaded
        if counts:
            kept.loads += int(fresh.sum())
            kept.idle_gpu_s += load_s * float(tick.gpus[fresh].sum())
        loaded = chosen
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class _Tick:
    number: int
    begin_s: float
    arrivals: WindowArrivals
    gpus: Floats
    busy_s: Floats
    busy_at_end: "np.ndarray[tuple[int], np.dtype[np.bool_]]"


def _ticks(log: UsageLog, tick_s: float) -> Iterator[_Tick]:
    """Yield each tick; models are numbered by first arrival."""
    first = np.full(len(log.models), np.inf)
    np.minimum.at(first, log.model, log.t_s)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    model, gpus, first = place[log.model], log.gpus[order], first[order]
    begin_s, end_s, owner = spells(log)
    owner = place[owner]
    by_begin = np.argsort(begin_s)
    begin_s, end_s, owner = begin_s[by_begin], end_s[by_begin], owner[by_begin]
    running: Whole = np.zeros(0, dtype=np.int64)
    at = 0
    for number in range(int(log.end_s / tick_s)):
        low, high = number * tick_s, (number + 1) * tick_s
        come = slice(*np.searchsorted(log.t_s, [low, high]))
        known = int(np.searchsorted(first, high))
        upto = int(np.searchsorted(begin_s, high))
        running = np.append(running[end_s[running] > low], np.arange(at, upto))
        at = upto
        busy_s = np.zeros(known)
        inside = np.clip(np.minimum(end_s[running], high) - np.maximum(begin_s[running], low), 0.0, None)
        np.add.at(busy_s, owner[running], inside)
        busy = np.zeros(known, dtype=bool)
        busy[owner[running[end_s[running] >= high]]] = True
        yield _Tick(number, low, WindowArrivals(log.t_s[come], model[come]), gpus[:known], busy_s, busy)
