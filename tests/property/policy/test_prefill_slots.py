"""Properties of the number of prompts at a prefill worker, and of the effect of chunk size on their TTFT."""

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.perfmodel.profiles import profile
from libs.policy.speed import HAND_OVER_S
from libs.policy.step_time import StepTimeModel, chunks_work
from libs.policy.worker.credits import FILLED_STEPS, MAX_PROMPTS, MIN_PROMPTS, SlotFacts, prefill_slots
from libs.policy.worker.saturation import MOST_TOKENS, knee_of
from libs.testing.examples import examples
from tests.property.policy.chunks import first_chunks

PROMPTS = 1500
LOAD = 0.75
"""The load as a share of the plateau."""


@given(st.integers(1, 512), st.floats(1, 1e5), st.integers(1, 8192), st.floats(1e-4, 10), st.floats(1.1, 10))
def test_a_prefill_worker_has_prompts_for_two_steps_and_a_hand_over_and_at_most_twice_that(
    most: int, mean_tokens: float, chunk_tokens: int, step_s: float, slower: float
) -> None:
    def taken(step_s: float) -> int:
        return prefill_slots(SlotFacts(most, mean_tokens, chunk_tokens, step_s))

    prompts, wanted_tokens = taken(step_s), chunk_tokens * (FILLED_STEPS + HAND_OVER_S / step_s)
    assert prompts == min(most, MAX_PROMPTS) or prompts * mean_tokens >= wanted_tokens
    assert prompts <= MIN_PROMPTS or prompts / 2 * mean_tokens < wanted_tokens
    assert taken(step_s * slower) <= prompts <= min(most, MAX_PROMPTS), (
        "the longer a step, the less comes too late for it"
    )


def mean_ttft_s(model: StepTimeModel, chunk_tokens: int, at_s: list[float], lengths: list[int]) -> float:
    """Return the mean TTFT of prompts computed in order, in steps of at most that many tokens without pauses."""
    now_s, first, come, computed, waited_s = 0.0, 0, 0, 0, 0.0
    while first < len(at_s):
        now_s = max(now_s, at_s[first])
        come = bisect_right(at_s, now_s, come)
        spans = first_chunks([(computed, lengths[first]), *((0, n) for n in lengths[first + 1 : come])], chunk_tokens)
        now_s += model.prefill_ns(chunks_work(spans)) / 1e9
        for _, end in spans:
            computed = end
            if end == lengths[first]:
                waited_s += now_s - at_s[first]
                first, computed = first + 1, 0
    return waited_s / len(at_s)


def check_choice(model: StepTimeModel, median_tokens: float, seed: int) -> None:
    chunk_tokens, plateau = knee_of(model, MOST_TOKENS)
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(median_tokens), 0.8, PROMPTS), 16, 4096).astype(int)
    at_s = np.cumsum(random.exponential(lengths.mean() / (LOAD * plateau), PROMPTS))
    found = {
        size: mean_ttft_s(model, size, at_s.tolist(), lengths.tolist())
        for size in {chunk_tokens, 256, 512, 1024, 2048, 4096, MOST_TOKENS}
    }
    assert found[chunk_tokens] <= 1.15 * min(found.values()), found


@pytest.mark.parametrize("name", ["llama3.1-8b-h100-aic", "llama3.1-8b-b200-aic", "llama3.1-70b-h100-tp4-aic"])
def test_the_smallest_saturating_chunk_has_nearly_the_best_ttft_of_any(name: str) -> None:
    check_choice(profile(name).step_time, 600, seed=0)


@settings(max_examples=examples(10), deadline=None)
@given(st.floats(2e6, 3e7), st.floats(5e3, 5e4), st.floats(100, 1000), st.integers(0, 99))
def test_the_smallest_saturating_chunk_has_nearly_the_best_ttft_on_other_devices(
    floor_ns: float, token_ns: float, median_tokens: float, seed: int
) -> None:
    check_choice(StepTimeModel(2e6, token_ns, 0.1, 5e6, 1e4, 50, 0.3, prefill_floor_ns=floor_ns), median_tokens, seed)
