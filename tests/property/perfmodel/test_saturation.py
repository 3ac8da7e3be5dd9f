"""Properties of the smallest saturating prefill chunk, found from noisy trials."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.perfmodel.profiles import PROFILES
from libs.policy.step_time import StepTimeModel, chunks_work
from libs.policy.worker.saturation import (
    CHUNK_MULTIPLE,
    GROWTH,
    KNEE,
    MOST_TOKENS,
    MeasuredStep,
    calibrated,
    knee_of,
    plan_trials,
    prompt_ns,
    sizes,
    trial_prompts,
    trial_work,
    ttft_under_load_ns,
)
from libs.testing.examples import examples
from libs.worker.tuning import find_knee

PRIOR = PROFILES["llama-8b-h100"].step_time
floors = st.floats(2e6, 3e7)
token_costs = st.floats(5e3, 1e5)


def device(floor_ns: float, token_ns: float) -> StepTimeModel:
    return StepTimeModel(1e5, token_ns, 0.2, 5e6, 1e4, 50, 0.3, prefill_floor_ns=floor_ns)


def rate(model: StepTimeModel, tokens: int) -> float:
    return tokens / model.prefill_ns(trial_work(tokens))


@settings(max_examples=examples(25), deadline=None)
@given(floors, token_costs, st.integers(0, 99))
@example(floor_ns=27.86e6, token_ns=5.11e3, seed=1105)  # the floor reaches to the last sizes, and some were held up
@example(floor_ns=21.66e6, token_ns=6.34e3, seed=837)
def test_the_chosen_chunk_reaches_the_plateau_and_is_near_the_smallest_that_does(
    floor_ns: float, token_ns: float, seed: int
) -> None:
    truth, random, most = device(floor_ns, token_ns), np.random.default_rng(seed), 8192
    trials = []
    for tokens in plan_trials(PRIOR, most, 60_000_000_000):
        duration = truth.prefill_ns(trial_work(tokens)) * math.exp(random.normal(0, 0.01))
        trials.append(MeasuredStep(tokens, round(duration * (random.uniform(2, 9) if random.random() < 0.05 else 1))))
    found = find_knee(PRIOR, trials)
    assert found is not None
    best = max(rate(truth, tokens) for tokens in range(CHUNK_MULTIPLE, most + 1, CHUNK_MULTIPLE))
    exact, _ = knee_of(truth, most)
    assert rate(truth, found.chunk_tokens) >= (KNEE - 0.02) * best
    assert abs(found.plateau_tokens_per_s / (best * 1e9) - 1) < 0.03
    assert found.chunk_tokens <= 1.5 * exact + 4 * CHUNK_MULTIPLE  # the plateau is flat: noise of 1 % moves the knee
    assert [point.tokens for point in found.curve] == sizes(most)


@settings(max_examples=examples(30), deadline=None)
@given(floors, token_costs, st.sampled_from([96, 256, 1024, 4096, MOST_TOKENS]))
def test_a_curve_is_complete_only_if_a_longer_one_would_find_no_faster_steps(
    floor_ns: float, token_ns: float, most: int
) -> None:
    truth = device(floor_ns, token_ns)
    trials = [MeasuredStep(size, round(truth.prefill_ns(trial_work(size)))) for size in sizes(most) for _ in range(3)]
    found = find_knee(truth, [*trials, *trials])
    assert found is not None
    plateau = max(rate(truth, size) for size in range(CHUNK_MULTIPLE, MOST_TOKENS + 1, CHUNK_MULTIPLE))
    if found.is_whole:
        assert rate(truth, most) >= 0.9 * plateau
    else:
        assert most < MOST_TOKENS and found.chunk_tokens > most / GROWTH


@settings(max_examples=examples(30), deadline=None)
@given(floors, token_costs, st.integers(1, 8192))
def test_the_knee_is_the_smallest_chunk_within_three_per_cent(floor_ns: float, token_ns: float, most: int) -> None:
    model = device(floor_ns, token_ns)
    knee, plateau = knee_of(model, most)
    assert 1 <= knee <= most
    if most >= CHUNK_MULTIPLE:
        assert rate(model, knee) * 1e9 >= KNEE * plateau
        assert knee == CHUNK_MULTIPLE or rate(model, knee - CHUNK_MULTIPLE) * 1e9 < KNEE * plateau


@given(st.integers(1, 20_000), st.integers(0, 10**11))
def test_trials_grow_to_the_bound_and_slow_devices_get_fewer(most: int, limit_ns: int) -> None:
    fast, slow = (list(plan_trials(PRIOR.scaled(factor), most, limit_ns)) for factor in (1, 10))
    assert set(slow) <= set(fast) <= set(sizes(most)) and len(slow) <= len(fast)
    assert sizes(most) == sorted(set(sizes(most))) and sizes(most)[-1] == most
    assert len({slow.count(size) for size in slow}) == bool(slow), "each size as often as the others"


def test_nothing_is_measured_if_no_curve_fits_into_the_time() -> None:
    slow = PROFILES["smollm2-135m-cpu"].step_time.scaled(10)
    assert list(plan_trials(slow, 8192, 10_000_000_000)) == []
    assert len(set(plan_trials(slow, 8192, 100_000_000_000))) >= 6


@given(st.floats(0.05, 20), st.integers(16, 512))
def test_one_step_suffices_to_estimate_the_speed_of_a_device(factor: float, tokens: int) -> None:
    duration_ns = round(PRIOR.scaled(factor).prefill_ns(trial_work(tokens)))
    assert calibrated(PRIOR, MeasuredStep(tokens, duration_ns)).prefill_token_ns == pytest.approx(
        factor * PRIOR.prefill_token_ns, rel=1e-3
    )


@given(st.integers(1, 20_000))
def test_a_trial_computes_the_tokens_it_reports(tokens: int) -> None:
    assert trial_work(tokens) == chunks_work((0, length) for length in trial_prompts(tokens))
    assert sum(trial_prompts(tokens)) == tokens
    assert min(trial_prompts(tokens)) > 0


def test_too_few_trials_give_no_result() -> None:
    assert find_knee(PRIOR, [MeasuredStep(64, 10**7)] * 5) is None


def test_ttft_at_a_busy_worker_counts_half_a_step_and_the_prompts_own_chunks() -> None:
    model = StepTimeModel(10, 1, 0, 0, 0, 0, 0)
    assert prompt_ns(model, 100, 40) == 10 * 3 + 100
    assert ttft_under_load_ns(model, 100, 40) == pytest.approx(25 + 130)
