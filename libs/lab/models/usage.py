"""When which model was in use: a log of requests as arrays, and the most models and GPUs in use at once by window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

MAX_WINDOWS: Final = 2_000_000
"""Two weeks of seconds are 1.2 million."""


@dataclass(frozen=True, slots=True, eq=False)
class UsageLog:
    """Requests in order of arrival."""

    name: str
    t_s: Floats
    """Arrivals, from a zero before the first: see `read_usage`."""
    model: Whole
    """Places in `models`."""
    exec_s: Floats
    """From arrival to the last token."""
    models: Sequence[str]
    gpus: Floats
    """That each model needs while it is in use, by its place."""
    notes: Sequence[str] = ()

    @property
    def end_s(self) -> float:
        """The last arrival. What runs on after it is not counted, since nobody knows what else came then."""
        return float(self.t_s[-1]) if len(self.t_s) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Requests of each window, one after the other from 0."""

    window_s: float
    peak_models: Whole
    """The most at once."""
    peak_gpus: Floats
    """The most at once that they need."""
    mean_models: Floats
    """Over time."""
    mean_gpus: Floats

    def __len__(self) -> int:
        return len(self.peak_models)


def spells(log: UsageLog, hold_s: float = 0.0) -> tuple[Floats, Floats, Whole]:
    """Times at which a model began and ceased to be in use, each stretch prolonged by `hold_s`: start, end, model, in
    no order."""
    order = np.lexsort((log.t_s, log.model))
    start, model = log.t_s[order], log.model[order]
    end = start + log.exec_s[order] + hold_s
    # Models lie one after the other on one axis of ranks, so that a running maximum over all stays within each.
    ends, rank = np.unique(end, return_inverse=True)
    latest = ends[np.maximum.accumulate(rank + model * len(ends)) - model * len(ends)] if len(end) else end
    is_first = np.ones(len(start), dtype=bool)
    is_first[1:] = (model[1:] != model[:-1]) | (start[1:] > latest[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(start)) - 1 if len(firsts) else firsts
    return start[firsts], latest[lasts], model[firsts]


def use_by_window(log: UsageLog, window_s: float, hold_s: float = 0.0) -> Use:
    """The use of each whole window up to the last arrival. Of two that meet, one that ends as another begins, the end
    comes first."""
    count = int(log.end_s / window_s)
    begin_s, end_s, model = spells(log, hold_s)
    lengthy = end_s > begin_s
    begin_s, end_s, model = begin_s[lengthy], end_s[lengthy], model[lengthy]
    edges = np.arange(count + 1) * window_s
    at = np.concatenate([end_s, begin_s, edges])
    kind = np.concatenate([np.zeros(len(end_s)), np.ones(len(begin_s)), np.full(len(edges), 2)])
    size = log.gpus[model]
    models = np.concatenate([np.full(len(end_s), -1), np.full(len(begin_s), 1), np.zeros(len(edges), dtype=np.int64)])
    gpus = np.concatenate([-size, size, np.zeros(len(edges))])
    order = np.lexsort((kind, at))
    at, models, gpus = at[order], np.cumsum(models[order]), np.cumsum(gpus[order])
    window = np.minimum((at / window_s + 1e-9).astype(np.int64), count)
    lasting_s = np.diff(at, append=at[-1] if len(at) else 0.0)
    starts = np.searchsorted(window, np.arange(count))
    if not count:
        empty = np.zeros(0)
        return Use(window_s, np.zeros(0, dtype=np.int64), empty, empty, empty)
    inside = slice(0, int(np.searchsorted(window, count)))
    return Use(
        window_s,
        np.maximum.reduceat(models[inside], starts),
        np.asarray(np.round(np.maximum.reduceat(gpus[inside], starts), 6), dtype=np.float64),
        np.add.reduceat((models * lasting_s)[inside], starts) / window_s,
        np.add.reduceat((gpus * lasting_s)[inside], starts) / window_s,
    )
