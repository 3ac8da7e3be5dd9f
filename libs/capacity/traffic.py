"""The traffic of a capacity plan: lengths and burstiness of requests, and arrivals drawn from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

import numpy as np

from libs.lab.traces.draws import gamma_ns, log_normal_tokens
from libs.lab.traces.request import Trace, TraceRequest

SPREAD: Final = 0.8
"""The standard deviation of the logarithms of lengths, used if only mean lengths are known."""
DRAWN: Final = 2000
MOST_CV: Final = 8.0

Lengths = Sequence[tuple[int, int]]
"""The prompt and output tokens of requests, from which a lab run draws its requests."""


@dataclass(frozen=True, slots=True)
class PlanTraffic:
    """The lengths and the burstiness of a plan's requests."""

    lengths: Lengths
    cv: float
    """The coefficient of variation of the gaps between arrivals, which is 1 for Poisson arrivals."""

    @property
    def prompt_tokens(self) -> float:
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @property
    def output_tokens(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)

    def scaled(self, prompts: float, outputs: float) -> "PlanTraffic":
        """Return the traffic with all lengths multiplied by these factors."""
        lengths = [(max(round(p * prompts), 1), max(round(o * outputs), 1)) for p, o in self.lengths]
        return replace(self, lengths=lengths)


def made_lengths(prompt_tokens: float, output_tokens: float, seed: int = 1) -> Lengths:
    """Return log-normal lengths with these means, for use if the lengths of single requests are unknown."""
    rng = np.random.default_rng(seed)
    prompts = log_normal_tokens(rng, max(prompt_tokens, 1.0), SPREAD, DRAWN)
    outputs = log_normal_tokens(rng, max(output_tokens, 1.0), SPREAD, DRAWN)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def gap_cv(dispersion: float) -> float:
    """Return the coefficient of variation of gaps that gives this index of dispersion of counts, at least 1."""
    return min(max(sqrt(max(dispersion, 0.0)), 1.0), MOST_CV)


def made_trace(lengths: Lengths, rate: float, cv: float, seconds: float, seed: int) -> Trace:
    """Return a trace of gamma arrivals, with lengths drawn from `lengths`."""
    rng = np.random.default_rng([seed, 7])
    times = gamma_ns(rng, rate, cv, seconds)
    picked = rng.integers(0, len(lengths), len(times))
    requests = [
        TraceRequest(number, at_ns, *lengths[which])
        for number, (at_ns, which) in enumerate(zip(times.tolist(), picked.tolist(), strict=True))
    ]
    if not requests:
        requests = [TraceRequest(0, 0, *lengths[0])]
    return Trace("plan", requests)
