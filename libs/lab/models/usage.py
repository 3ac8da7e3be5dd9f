"""Model use over time: a log of requests as arrays, and the peak number of models and GPUs in use per window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

# Two weeks of one-second windows are 1.2 million.
MAX_WINDOWS: Final = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)
class UsageLog:
    """A log of requests in order of arrival."""

    name: str
    t_s: Floats
    """Arrivals, counted from a zero at or before the first (see `read_usage`)."""
    model: Whole
    """Each request's model, as an index into `models`."""
    exec_s: Floats
    """Seconds from arrival to the last token."""
    models: Sequence[str]
    gpus: Floats
    """The GPUs that each model needs while in use, by index."""
    notes: Sequence[str] = ()

    @property
    def end_s(self) -> float:
        """The time of the last arrival. Runs beyond it do not count, since later arrivals are unknown."""
        return float(self.t_s[-1]) if len(self.t_s) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """The use in consecutive windows, beginning at 0."""

    window_s: float
    peak_models: Whole
    """The most models in use at once."""
    peak_gpus: Floats
    """The most GPUs needed at once by the models in use."""
    mean_models: Floats
    """The average number of models in use over time."""
    mean_gpus: Floats

    def __len__(self) -> int:
        return len(self.peak_models)


def spells(log: UsageLog, hold_s: float = 0.0) -> tuple[Floats, Floats, Whole]:
    """Return the start, end and model of every stretch of use, prolonged by `hold_s`, in no particular order."""
    order = np.lexsort((log.t_s, log.model))
    start, model = log.t_s[order], log.model[order]
    end = start + log.exec_s[order] + hold_s
    # Models occupy consecutive ranges of one axis of ranks, so that one running maximum serves all of them.
    ends, rank = np.unique(end, return_inverse=True)
    latest = ends[np.maximum.accumulate(rank + model * len(ends)) - model * len(ends)] if len(end) else end
    is_first = np.ones(len(start), dtype=bool)
    is_first[1:] = (model[1:] != model[:-1]) | (start[1:] > latest[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(start)) - 1 if len(firsts) else firsts
    return start[firsts], latest[lasts], model[firsts]


def use_by_window(log: UsageLog, window_s: float, hold_s: float = 0.0) -> Use:
    """Return the use of each whole window up to the last arrival. An end at the same moment as a begin comes first."""
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
