"""Baselines for reservations: a fixed Poisson rate per model, keep-alives, and one GPU per model."""

import numpy as np

from libs.lab.models.usage import Floats, UsageLog, Use, spells, use_by_window
from libs.policy.reserve.counts import gpu_units, quantile, sum_distribution
from libs.policy.reserve.steady import poisson_active

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
