"""Seeded draws of lengths and of arrival times for several processes. Times are sorted integer ns from 0."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.lines import MAX_REQUESTS, MAX_TOKENS

SECOND_NS: Final = 1_000_000_000

Whole = NDArray[np.int64]


def check_count(requests: float) -> None:
    """Raise InvalidRequest for more requests than a trace may have, before any memory is allocated for them."""
    if requests > MAX_REQUESTS:
        raise InvalidRequest(f"about {requests:.0f} requests: a trace has at most {MAX_REQUESTS}")


def log_normal_tokens(rng: np.random.Generator, mean: float, spread: float, count: int) -> Whole:
    """Draw log-normal lengths with this mean, each at least 1; `spread` is the standard deviation of their logarithm.

    With a spread of 0.8 the 99th percentile is 4.7 times the mean.
    """
    factors = np.exp(rng.normal(-spread * spread / 2, spread, count))
    return np.clip(np.rint(mean * factors), 1, MAX_TOKENS).astype(np.int64)


def poisson_ns(rng: np.random.Generator, rate: float, seconds: float) -> Whole:
    """Draw a Poisson process with `rate` arrivals per second on average."""
    check_count(rate * seconds)
    count = int(rng.poisson(rate * seconds))
    return _sorted_ns(rng.uniform(0, seconds, count), seconds)


def gamma_ns(rng: np.random.Generator, rate: float, cv: float, seconds: float) -> Whole:
    """Draw arrivals with independent gamma-distributed gaps.

    `cv` is the gaps' coefficient of variation: 1 for Poisson, more for bursts.
    """
    check_count(rate * seconds)
    shape, chunk = 1 / (cv * cv), int(rate * seconds) + 100
    parts: list[NDArray[np.float64]] = []
    end_s = 0.0
    count = 0
    while end_s < seconds:
        check_count(count)
        part = end_s + np.cumsum(rng.gamma(shape, 1 / (rate * shape), chunk))
        parts.append(part)
        end_s = float(part[-1])
        count += chunk
    times_s = np.concatenate(parts)
    return _sorted_ns(times_s[times_s < seconds], seconds)


def on_off_ns(rng: np.random.Generator, rate: float, on_s: float, off_s: float, seconds: float) -> Whole:
    """Draw Poisson arrivals that switch on and off, each phase lasting an exponential time with the given mean.

    `rate` is the average over both phases.
    """
    check_count(rate * seconds)
    rate_on = rate * (on_s + off_s) / on_s
    is_on = bool(rng.random() < on_s / (on_s + off_s))
    at_s = 0.0
    parts: list[NDArray[np.float64]] = []
    while at_s < seconds:
        until_s = min(at_s + rng.exponential(on_s if is_on else off_s), seconds)
        if is_on:
            parts.append(rng.uniform(at_s, until_s, int(rng.poisson(rate_on * (until_s - at_s)))))
        at_s, is_on = until_s, not is_on
    times_s = np.concatenate(parts) if parts else np.zeros(0)
    check_count(len(times_s))
    return _sorted_ns(times_s, seconds)


def swell_ns(rng: np.random.Generator, rate: float, seconds: float) -> Whole:
    """Draw Poisson arrivals whose rate rises from zero to `rate` halfway and falls again, as a raised cosine."""
    check_count(rate * seconds)
    times_s = rng.uniform(0, seconds, int(rng.poisson(rate * seconds)))
    height = (1 - np.cos(2 * np.pi * times_s / seconds)) / 2
    return _sorted_ns(times_s[rng.random(len(times_s)) < height], seconds)


def _sorted_ns(times_s: NDArray[np.float64], seconds: float) -> Whole:
    # The bound keeps rounding from placing an arrival at the very end.
    whole = np.minimum(np.rint(times_s * SECOND_NS).astype(np.int64), round(seconds * SECOND_NS) - 1)
    whole.sort()
    return whole
