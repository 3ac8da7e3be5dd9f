"""The workload of Aegaeon (SOSP 2025): models of 6 to 14 billion parameters, each requested rarely, with ShareGPT
lengths.

Step times were measured on H800s (docs/profiles.md).
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
"""Bytes of weights (two a parameter) by profile; models are of these kinds in turn."""
INPUT_TOKENS, INPUT_SIGMA = 700.0, 1.2
OUTPUT_TOKENS, OUTPUT_SIGMA = 300.0, 0.6
"""Means and sigmas of log-normal lengths, with the means of Aegaeon's own logs."""
MOST_TOKENS: Final = 4_000


@dataclass(frozen=True, slots=True)
class AegaeonModel:
    """A model of the catalogue with its size and step times."""

    name: str
    weights_bytes: float
    kv_bytes_per_token: int
    step_time: StepTimeModel


@dataclass(slots=True)
class ServedRequest:
    """A request with its progress so far."""

    t_s: float
    model: str
    input_tokens: int
    output_tokens: int
    done_tokens: int = 0
    """Output tokens it had when it last began to run."""
    waits_since_s: float = 0.0
    first_s: float = 0.0
    """Time of the first token; 0 if there is none yet."""
    end_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the answer was complete within the limits of TTFT and TPOT."""
        if not self.end_s:
            return False
        tpot_s = (self.end_s - self.first_s) / max(self.output_tokens - 1, 1)
        return self.first_s - self.t_s <= TTFT_S and tpot_s <= TPOT_S


def models_of(number: int) -> dict[str, AegaeonModel]:
    """Return `number` models, cycling through the kinds."""
    found = {}
    for place, (kind, weights) in zip(range(number), _turns(), strict=False):
        known = profile(kind)
        name = f"model-{place:03}"
        found[name] = AegaeonModel(name, weights, known.kv_bytes_per_token, known.step_time)
    return found


def _turns() -> Sequence[tuple[str, float]]:
    return list(KINDS.items()) * 100


def requests_of(models: Mapping[str, AegaeonModel], rate: float, seconds: float, seed: int) -> list[ServedRequest]:
    """Draw Poisson arrivals at `rate` requests a second to each model, sorted by time."""
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
    """Return the share of good requests among those that arrived from `from_s` on."""
    counted = [each for each in requests if each.t_s >= from_s]
    return sum(each.is_good for each in counted) / max(len(counted), 1)
