"""Aegaeon's recipe (SOSP 2025): models of 6 to 14 billion parameters, each asked seldom, with ShareGPT's lengths.

Step times are those that were measured on H800s (docs/profiles.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.perfmodel.profiles import profile
from libs.policy.step_time import StepTimeModel

TTFT_S: Final = 10.0
TPOT_S: Final = 0.1
KINDS: Final[Mapping[str, float]] = {
    "yi1.5-6b-h800": 12.1e9,
    "qwen2.5-7b-h800": 15.2e9,
    "llama2-13b-h800": 26.0e9,
    "internlm2.5-7b-h800": 15.5e9,
    "yi1.5-9b-h800": 17.7e9,
    "qwen1.5-14b-h800": 28.3e9,
}
"""Profiles and bytes of weights, two a parameter; models are of these kinds in turn."""
INPUT_TOKENS, INPUT_SIGMA = 700.0, 1.2
OUTPUT_TOKENS, OUTPUT_SIGMA = 300.0, 0.6
"""Means and widths of log-normal lengths: the means are those of Aegaeon's own logs."""
MOST_TOKENS: Final = 4_000


@dataclass(frozen=True, slots=True)
class AegaeonModel:
    """One of the catalogue."""

    name: str
    weights_bytes: float
    kv_bytes_per_token: int
    step_time: StepTimeModel


@dataclass(slots=True)
class ServedRequest:
    """One request, and what came of it."""

    t_s: float
    model: str
    input_tokens: int
    output_tokens: int
    done_tokens: int = 0
    """Answered when it last began to run."""
    waits_since_s: float = 0.0
    first_s: float = 0.0
    """0: no token came."""
    end_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it was answered within both limits."""
        if not self.end_s:
            return False
        tpot_s = (self.end_s - self.first_s) / max(self.output_tokens - 1, 1)
        return self.first_s - self.t_s <= TTFT_S and tpot_s <= TPOT_S


def models_of(number: int) -> dict[str, AegaeonModel]:
    """`number` models, of each kind in turn."""
    found = {}
    for place, (kind, weights) in zip(range(number), _turns(), strict=False):
        known = profile(kind)
        name = f"model-{place:03}"
        found[name] = AegaeonModel(name, weights, known.kv_bytes_per_token, known.step_time)
    return found


def _turns() -> Sequence[tuple[str, float]]:
    return list(KINDS.items()) * 100


def requests_of(models: Mapping[str, AegaeonModel], rate: float, seconds: float, seed: int) -> list[ServedRequest]:
    """Poisson arrivals at `rate` requests a second to each model, in order."""
    found = []
    for place, name in enumerate(models):
        rng = np.random.default_rng([seed, place])
        times = np.sort(rng.uniform(0, seconds, int(rng.poisson(rate * seconds))))
        inputs = _lengths(rng, INPUT_TOKENS, INPUT_SIGMA, len(times))
        outputs = _lengths(rng, OUTPUT_TOKENS, OUTPUT_SIGMA, len(times))
        found += [
            ServedRequest(t_s, name, isl, osl)
            for t_s, isl, osl in zip(times.tolist(), inputs, outputs, strict=True)
        ]  # fmt: skip
    return sorted(found, key=lambda each: each.t_s)


def _lengths(rng: np.random.Generator, mean: float, sigma: float, number: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, number)
    return [int(each) for each in np.clip(np.round(drawn), 2, MOST_TOKENS).tolist()]


def good_share(requests: Sequence[ServedRequest], from_s: float) -> float:
    """Share of requests in time, of those that came from then on."""
    counted = [each for each in requests if each.t_s >= from_s]
    return sum(each.is_good for each in counted) / max(len(counted), 1)
