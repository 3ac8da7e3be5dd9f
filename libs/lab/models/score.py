"""Scores of reservations, and the baselines that they are compared with.

A score is how often demand exceeded the reservation, how certain that is, and its cost against hindsight. The baselines
are a fixed Poisson rate per model, keep-alives, and one GPU per model.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.lab.models.usage import Floats, UsageLog, Use, spells, use_by_window
from libs.policy.reserve.counts import gpu_units, poisson_active, quantile, sum_distribution

RESAMPLES: Final = 2000
# Consecutive windows are drawn together, since misses seldom come alone.
BLOCK_WINDOWS: Final = 30
INTERVAL: Final = (0.025, 0.975)
SLACK: Final = 1.05
SLACK_GPUS: Final = 1.0
"""Allowances over the best constant reservation in hindsight, of which the larger one counts."""


@dataclass(frozen=True, slots=True)
class ReserveScore:
    """The score of one policy over the windows after the warm-up."""

    policy: str
    coverage: float
    """The share of windows whose peak demand in GPUs stayed within the reservation."""
    interval: tuple[float, float]
    """The 95 % interval of the coverage, by block bootstrap."""
    reserved_gpus: float
    """The reservation in GPUs, averaged over the windows."""
    cost: float
    """The mean reservation over that in hindsight."""
    keeps_confidence: bool
    """Whether the upper end of the interval reaches the confidence."""
    keeps_cost: bool


def clairvoyant(peak_gpus: Floats, per_period: int, confidence: float) -> Floats:
    """Return the best reservation in hindsight for each window.

    It is the smallest whole number, constant over a planning period, that at most 1 − confidence of the period's
    windows exceed. The remainder at the end counts as a period.
    """
    found = np.empty(len(peak_gpus))
    for begin in range(0, len(peak_gpus), per_period):
        part = np.sort(peak_gpus[begin : begin + per_period])
        allowed = int((1 - confidence) * len(part) + 1e-9)
        found[begin : begin + per_period] = np.ceil(part[len(part) - 1 - allowed] - 1e-9)
    return found


def grade(
    policy: str, reserved_gpus: Floats, peak_gpus: Floats, hindsight_gpus: Floats, *, confidence: float, held: Floats
) -> ReserveScore:
    """Score one policy. `held` is the GPUs paid for, which may exceed those reserved at the start of a window."""
    covered = peak_gpus <= reserved_gpus + 1e-9
    interval = block_bootstrap(covered.astype(np.float64))
    mean, best = float(held.mean()), float(hindsight_gpus.mean())
    return ReserveScore(
        policy,
        float(covered.mean()),
        interval,
        mean,
        mean / best if best else 1.0,
        interval[1] >= confidence,
        mean <= max(SLACK * best, best + SLACK_GPUS) + 1e-9,
    )


def block_bootstrap(values: Floats, seed: int = 1) -> tuple[float, float]:
    """Return the confidence interval of the mean from overlapping blocks drawn with replacement.

    As many blocks are drawn as cover the length of the series.
    """
    count = len(values)
    block = min(BLOCK_WINDOWS, max(count // 4, 1))
    sums = np.convolve(values, np.ones(block), mode="valid")
    drawn = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, -(-count // block)))
    means = sums[drawn].mean(axis=1) / block
    low, high = np.quantile(means, INTERVAL)
    return float(low), float(high)


KEEP_ALIVES_S = (60.0, 300.0)


def fixed_poisson(log: UsageLog, use: Use, warmup: int, confidence: float) -> Floats:
    """Reserve by Aegaeon's arithmetic, one number for all windows.

    Each model is active for 1 − exp(−λT) of the time, independently of the others. Rates and run times are those of
    the first `warmup` windows.
    """
    until_s = warmup * use.window_s
    known = log.t_s < until_s
    if not known.any():
        return np.zeros(len(use))
    count = np.bincount(log.model[known], minlength=len(log.models)).astype(np.float64)
    ran_s = np.bincount(log.model[known], weights=log.exec_s[known], minlength=len(log.models))
    active = poisson_active(count / until_s, ran_s / np.maximum(count, 1))
    asked = count > 0
    units, unit = gpu_units(log.gpus[asked])
    found = quantile(sum_distribution(active[None, asked], units)[0], confidence) * unit
    return np.full(len(use), float(np.ceil(found - 1e-9)))


def keep_alive(log: UsageLog, use: Use, hold_s: float) -> tuple[Floats, Floats]:
    """Return the GPUs of loaded models at the start of each window, and the mean number held during it.

    A model is loaded when it is requested and stays for `hold_s` after its last request.
    """
    begin_s, end_s, model = spells(log, hold_s)
    edges: Floats = np.arange(len(use), dtype=np.float64) * use.window_s
    size = log.gpus[model]
    return _until(begin_s, size, edges) - _until(end_s, size, edges), use_by_window(log, use.window_s, hold_s).mean_gpus


def one_a_model(log: UsageLog, use: Use) -> Floats:
    """Return the GPUs of every model requested before each window begins."""
    first = np.full(len(log.models), np.inf)
    np.minimum.at(first, log.model, log.t_s)
    return _until(first, log.gpus, np.arange(len(use), dtype=np.float64) * use.window_s)


def _until(at_s: Floats, size: Floats, edges: Floats) -> Floats:
    """Return the sum of sizes whose time is at or before each edge."""
    order = np.argsort(at_s)
    return np.asarray(np.append(0.0, np.cumsum(size[order]))[np.searchsorted(at_s[order], edges, side="right")])
