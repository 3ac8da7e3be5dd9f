"""Summary statistics of a trace: rates, lengths, prefix sharing and burstiness."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from libs.lab.traces.draws import SECOND_NS
from libs.lab.traces.request import Trace, TraceRequest

DISPERSION_WINDOWS_S: Final = (1, 10, 60)
PERCENTILES: Final = (50, 90, 99)


def describe(trace: Trace) -> dict[str, Any]:
    """Return statistics that serialise to JSON, with None if a trace is too short."""
    duration_s = trace.duration_ns / SECOND_NS
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "duration_s": duration_s,
        # The number of gaps over their total time: n arrivals have n - 1 gaps.
        "rate_per_s": (len(trace.requests) - 1) / duration_s if duration_s else None,
        "input_tokens": _lengths([each.input_tokens for each in trace.requests]),
        "output_tokens": _lengths([each.output_tokens for each in trace.requests]),
        "block_tokens": trace.block_tokens,
        "prefix_share": prefix_share(trace),
        "dispersion": {
            f"{window_s} s": None if math.isnan(found := dispersion(trace, window_s * SECOND_NS)) else found
            for window_s in DISPERSION_WINDOWS_S
        },
        "sessions": len({each.session for each in trace.requests} - {0}),
        "classes": _counts(each.service_class for each in trace.requests),
        "models": _counts(each.model for each in trace.requests),
        "notes": list(trace.notes),
    }


def prefix_share(trace: Trace) -> float:
    """Return the share of prompt tokens that an unbounded cache shared by all workers would hold on arrival.

    Only the prompts of earlier requests count. Generated tokens have no hash ids until a later prompt repeats them.
    """
    seen: set[int] = set()
    shared = total = 0
    for each in trace.requests:
        total += each.input_tokens
        shared += min(_leading(each, seen) * trace.block_tokens, each.input_tokens)
        seen.update(each.hash_ids)
    return shared / total if total else 0.0


def _leading(request: TraceRequest, seen: set[int]) -> int:
    """Return the number of leading blocks of the request's prompt that are in `seen`."""
    return next((place for place, each in enumerate(request.hash_ids) if each not in seen), len(request.hash_ids))


def dispersion(trace: Trace, window_ns: int) -> float:
    """Return the index of dispersion of arrivals per window: 1 for Poisson, 0 for a clock, more for bursts.

    This is the variance over the mean, across whole windows from the trace's start to its last arrival. It is NaN with
    fewer than two windows, or without arrivals in them.
    """
    if window_ns <= 0:
        raise ValueError("a window is longer than nothing")
    windows = trace.requests[-1].arrival_ns // window_ns if trace.requests else 0
    if windows < 2:
        return math.nan
    places = np.fromiter((each.arrival_ns // window_ns for each in trace.requests), np.int64, len(trace.requests))
    # Counts only windows with arrivals; empty windows would add zeros.
    _, counts = np.unique(places[places < windows], return_counts=True)
    mean = float(counts.sum()) / windows
    if not mean:
        return math.nan
    variance = float((counts.astype(np.float64) ** 2).sum()) / windows - mean * mean
    return max(variance, 0.0) / mean


def _lengths(tokens: Sequence[int]) -> dict[str, float | int] | None:
    if not tokens:
        return None
    ranked = np.percentile(tokens, PERCENTILES, method="inverted_cdf")
    found = {f"p{percentile}": int(value) for percentile, value in zip(PERCENTILES, ranked, strict=True)}
    return {"mean": float(np.mean(tokens)), **found}


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of requests per name, most frequent first; "" counts requests without a name."""
    return dict(Counter(names).most_common())
