"""A log replayed window by window: what is known of each once it has passed, and nothing of what comes."""

from collections.abc import Iterator

import numpy as np

from libs.lab.models.usage import UsageLog, Use
from libs.policy.reserve.arrivals import Arrivals
from libs.policy.reserve.forecaster import Seen


def seen_by_window(log: UsageLog, use: Use) -> Iterator[Seen]:
    """Each window in turn. Models are numbered as they first come, so that none is known before."""
    first = np.full(len(log.models), np.inf)
    np.minimum.at(first, log.model, log.t_s)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    first, gpus, model = first[order], log.gpus[order], place[log.model]
    ended_s = log.t_s + log.exec_s
    by_end = np.argsort(ended_s, kind="stable")
    edges = np.arange(len(use) + 1) * use.window_s
    begins = np.searchsorted(log.t_s, edges, side="left")
    ends = np.searchsorted(ended_s[by_end], edges, side="left")
    known = np.searchsorted(first, edges, side="left")
    for window in range(len(use)):
        come = slice(int(begins[window]), int(begins[window + 1]))
        gone = by_end[ends[window] : ends[window + 1]]
        yield Seen(
            begin_s=float(edges[window]),
            end_s=float(edges[window + 1]),
            arrivals=Arrivals(log.t_s[come], model[come]),
            ended_model=model[gone],
            ended_start_s=log.t_s[gone],
            ended_s=ended_s[gone],
            gpus=gpus[: known[window + 1]],
            peak_gpus=float(use.peak_gpus[window]),
            mean_models=float(use.mean_models[window]),
        )
