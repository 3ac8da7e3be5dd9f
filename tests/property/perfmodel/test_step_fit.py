"""Properties of step-time models fitted to measured steps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.perfmodel.fit import (
    MAX_CELLS,
    MIN_KIND_ROWS,
    MIN_SCALED,
    MIN_STEPS,
    STEPS_PER_CELL,
    StepSamples,
    fit_steps,
    loss,
    nonnegative,
    predict,
    remembered_steps,
    robust_weights,
)
from libs.perfmodel.learner import FittedModel, KindFit, StepKind, StepTimeLearner, combine
from libs.perfmodel.profiles import PROFILES, profile
from libs.perfmodel.wire import fitted_model, step_time_message
from libs.policy.step_time import MATRIX_ROWS, UNREACHED_SEQUENCES, StepTimeModel, StepWork, chunks_work
from libs.testing.examples import examples

GPU = StepTimeModel(2e6, 22_000, 0.5, 6e6, 15_000, 60, 0.6, prefill_floor_ns=9e6)
CPU = StepTimeModel(20e6, 3_000_000, 300, 40e6, 2_000_000, 4_000, 0.9, decode_matrix_ns=15e6)
PRIORS = [entry.step_time for entry in PROFILES.values() if entry.name != "instant"]
PREFILL, DECODE, MIXED = "p", "d", "m"

models = st.builds(
    StepTimeModel,
    st.floats(0, 3e7),
    st.floats(1e3, 3e6),
    st.floats(0, 300),
    st.floats(1e5, 5e7),
    st.floats(0, 3e6),
    st.floats(0, 4e3),
    interference=st.floats(0, 1),
    decode_matrix_ns=st.floats(0, 5e7),
)


EAGER = replace(
    GPU, prefill_floor_ns=26e6, saturating_sequences=24, decode_wide_ns=90_000, graph_sequences=40, graph_exit_ns=9e6
)


def some_work(kind: str, random: np.random.Generator) -> StepWork:
    """A step with sizes over three orders of magnitude."""
    chunks = []
    if kind != DECODE:
        for _ in range(random.integers(1, 3)):
            start = int(random.choice([0, 0, 512, 2048, 8000]))
            chunks.append((start, start + int(2 ** random.uniform(4, 11))))
    batch = int(2 ** random.uniform(0, 6)) if kind != PREFILL else 0
    kv_tokens = int(batch * 2 ** random.uniform(6, 13))
    return chunks_work(chunks, StepWork(decode_sequences=batch, decode_kv_tokens=kv_tokens))


def measured(
    truth: StepTimeModel, kinds: str, steps: int, *, noise: float = 0.03, outliers: float = 0.0, seed: int = 0
) -> StepSamples:
    """Return steps with noise, some of them many times too slow."""
    random = np.random.default_rng(seed)
    samples = StepSamples()
    for index in range(steps):
        work = some_work(kinds[index % len(kinds)], random)
        duration = truth.step_ns(work) * math.exp(random.normal(0, noise))
        if random.random() < outliers:
            duration *= random.uniform(2, 20)
        samples.add(work, max(round(duration), 1))
    return samples


def errors(model: StepTimeModel, truth: StepTimeModel, kinds: str, seed: int = 9) -> Sequence[float]:
    """Return the relative errors on steps that no fit has seen."""
    random = np.random.default_rng(seed)
    works = [some_work(kind, random) for kind in kinds for _ in range(200)]
    return [abs(model.step_ns(work) / truth.step_ns(work) - 1) for work in works]


@pytest.mark.parametrize("truth", [GPU, CPU])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("kinds", [PREFILL, DECODE, PREFILL + DECODE + MIXED])
def test_a_few_hundred_noisy_steps_with_outliers_suffice(
    truth: StepTimeModel, prior: StepTimeModel, kinds: str
) -> None:
    found = fit_steps(prior, measured(truth, kinds, 300, outliers=0.08).rows())
    assert np.median(errors(found, truth, kinds)) < 0.02
    assert np.quantile(errors(found, truth, kinds), 0.9) < 0.06


@pytest.mark.parametrize("truth", [GPU, CPU])
def test_three_dozen_steps_improve_the_model(truth: StepTimeModel) -> None:
    for kinds in (PREFILL, DECODE):
        found = fit_steps(PRIORS[0], measured(truth, kinds, 36).rows())
        assert np.median(errors(found, truth, kinds)) < 0.04


@pytest.mark.parametrize("truth", [GPU, CPU])
@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_token_ns": 0.25},
        {"prefill_token_squared_ns": 20.0},
        {"prefill_token_ns": 0.125, "prefill_token_squared_ns": 30.0, "prefill_floor_ns": 0.3, "prefill_fixed_ns": 0.0},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_prefill_prior_is_corrected_among_ten_times_as_many_decodes(
    truth: StepTimeModel, wrong: dict[str, float], seed: int
) -> None:
    prior = replace(truth, **{name: getattr(truth, name) * factor for name, factor in wrong.items()})
    random, samples = np.random.default_rng(seed), StepSamples()
    for turn in range(264):
        work, noise = some_work(DECODE, random), 0.01
        if turn % 11 == 0:
            work, noise = some_work(PREFILL, random), 0.03
        samples.add(work, round(truth.step_ns(work) * math.exp(random.normal(0, noise))))
    found = fit_steps(prior, samples.rows())
    assert np.median(errors(found, truth, PREFILL)) < 0.03
    assert np.quantile(errors(found, truth, PREFILL), 0.9) < 0.06
    assert np.median(errors(found, truth, DECODE)) < 0.02


@given(st.integers(0, 2**32 - 1), st.integers(MIN_KIND_ROWS, 200), st.integers(0, MIN_KIND_ROWS * 3))
def test_outliers_are_judged_within_each_kind_of_step(seed: int, many: int, few: int) -> None:
    random = np.random.default_rng(seed)
    first = np.arange(many + few) < many
    residual = np.where(first, 0.01, 0.5) * random.uniform(0.8, 1.2, many + few)
    residual[0] = 5.0
    weight = robust_weights(residual, (first, ~first))
    assert weight[0] == 0 and (weight[1:many] > 0.8).all()
    if few >= MIN_KIND_ROWS:
        assert (weight[many:] > 0.8).all(), "a kind that is foretold badly must still be learned from"
    residual[-1] = 50.0
    assert robust_weights(residual, (first, ~first))[-1] == 0 or 0 < few < MIN_KIND_ROWS


def test_mixed_steps_alone_suffice_to_predict_mixed_steps() -> None:
    found = fit_steps(PRIORS[0], measured(GPU, MIXED, 300).rows())
    assert np.median(errors(found, GPU, MIXED)) < 0.03


@settings(max_examples=examples(25), deadline=None)
@given(models, models, st.sampled_from([PREFILL, DECODE, MIXED, PREFILL + DECODE + MIXED]), st.integers(0, 120))
def test_a_fit_is_finite_monotonic_and_no_worse_than_its_prior(
    truth: StepTimeModel, prior: StepTimeModel, kinds: str, steps: int
) -> None:
    rows = measured(truth, kinds, steps, outliers=0.1).rows()
    found = fit_steps(prior, rows)
    values = [getattr(found, name) for name in StepTimeModel.__dataclass_fields__]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert found.interference <= 1
    assert loss(found, rows) <= loss(prior, rows) + 1e-12
    base = StepWork(64, 1, 640, 4, 4000)
    for more in (StepWork(65, 1, 641, 4, 4000), StepWork(64, 1, 640, 5, 4000), StepWork(64, 1, 640, 4, 4001)):
        assert found.step_ns(more) >= found.step_ns(base) * (1 - 1e-9)


@given(models, st.integers(0, MIN_SCALED - 1), st.integers(0, MIN_STEPS - 1))
def test_too_few_steps_leave_the_prior_unchanged(truth: StepTimeModel, pure: int, mixed: int) -> None:
    for kinds, steps in ((PREFILL, pure), (DECODE, pure), (MIXED, mixed)):
        assert fit_steps(PRIORS[0], measured(truth, kinds, steps).rows()) == PRIORS[0]


@settings(deadline=None)
@given(
    st.sampled_from([GPU, CPU]), st.floats(0.2, 5), st.sampled_from([PREFILL, DECODE]),
    st.integers(MIN_SCALED, MIN_STEPS - 1), st.integers(0, 99),
)  # fmt: skip
def test_a_few_steps_scale_the_model_to_the_speed_of_the_device(
    prior: StepTimeModel, factor: float, kind: str, steps: int, seed: int
) -> None:
    found = fit_steps(prior, measured(prior.scaled(factor), kind, steps, seed=seed).rows())
    assert max(errors(found, prior.scaled(factor), kind)) <= 0.1
    assert max(errors(found, prior, DECODE if kind == PREFILL else PREFILL)) == 0, "of the other they say nothing"


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([GPU, CPU]), st.integers(1, 64), st.integers(16, 8192), st.integers(0, 99))
def test_equal_steps_do_not_degrade_a_good_prior(truth: StepTimeModel, batch: int, context: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = StepSamples()
    for _ in range(200):
        work = StepWork(decode_sequences=batch, decode_kv_tokens=batch * context + int(random.integers(0, 3)))
        samples.add(work, round(truth.step_ns(work) * math.exp(random.normal(0, 0.03))))
    found = fit_steps(truth, samples.rows())
    assert np.max(errors(found, truth, DECODE)) < 0.1
    assert errors(found, truth, PREFILL) == [0.0] * 200


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from([GPU, CPU]), st.sampled_from([PREFILL, DECODE]), st.integers(MIN_SCALED, 200),
    st.tuples(st.floats(0, 0.3), st.floats(0, 0.9), st.floats(0.1, 5)), st.integers(0, 99),
)  # fmt: skip
def test_short_steps_on_a_busy_host_do_not_change_the_fit_of_long_ones(
    truth: StepTimeModel, kind: str, steps: int, busy: tuple[float, float, float], seed: int
) -> None:
    noise, late, late_by = busy
    random, samples = np.random.default_rng(seed), StepSamples()
    for _ in range(steps):
        short = StepWork(decode_sequences=1, decode_kv_tokens=100)
        if kind == PREFILL:
            end = int(random.integers(7, 60))
            short = chunks_work([(0, end)])
        delayed = random.exponential(late_by) if random.random() < late else 0.0
        samples.add(short, round(truth.step_ns(short) * (1 + abs(random.normal(0, noise)) + delayed)))
    found = fit_steps(truth, samples.rows(), remembered_steps(truth, prefill=True, decode=True))
    long = chunks_work([(0, 4096)]) if kind == PREFILL else StepWork(decode_sequences=64, decode_kv_tokens=200_000)
    assert found.step_ns(long) == pytest.approx(truth.step_ns(long), rel=0.25)


def test_an_instant_device_adds_no_remembered_steps() -> None:
    instant = PROFILES["instant"].step_time
    rows = measured(GPU, PREFILL + DECODE, 80).rows()
    assert fit_steps(instant, rows, remembered_steps(instant, prefill=True, decode=True)) == fit_steps(instant, rows)


@pytest.mark.parametrize("truth", [GPU, CPU])
@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_a_device_that_differs_from_memory_is_followed(truth: StepTimeModel, factor: float) -> None:
    samples = measured(truth.scaled(factor), PREFILL + DECODE + MIXED, 400)
    found = fit_steps(truth, samples.rows(), remembered_steps(truth, prefill=True, decode=True))
    for kind in (PREFILL, DECODE):
        assert np.median(errors(found, truth.scaled(factor), kind)) < 0.05


def test_a_device_that_changes_is_followed() -> None:
    learner = StepTimeLearner(PRIORS[0])
    random = np.random.default_rng(4)
    for truth in (GPU, GPU.scaled(1.7)):
        for _ in range(6000):
            work = some_work(DECODE, random)
            learner.add(work, round(truth.step_ns(work)))
        learner.refit()
    assert np.median(errors(learner.model, GPU.scaled(1.7), DECODE)) < 0.05


def test_reported_errors_are_of_predictions_made_before_the_step() -> None:
    learner = StepTimeLearner(GPU.scaled(2))
    random = np.random.default_rng(5)
    assert learner.fitted().decode == KindFit()
    for _ in range(100):
        work = some_work(DECODE, random)
        learner.add(work, round(GPU.step_ns(work)))
    fitted = learner.fitted()
    assert fitted.decode.steps == 100 and fitted.decode.error_p50 == pytest.approx(1.0)
    assert fitted.prefill == fitted.mixed == KindFit()
    assert learner.refit()
    assert not learner.refit()
    for _ in range(300):
        work = some_work(DECODE, random)
        learner.add(work, round(GPU.step_ns(work)))
    assert learner.fitted().decode.error_p90 < 0.01


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 64), st.integers(0, 10**6)), max_size=300))
def test_the_number_of_stored_steps_is_bounded(steps: list[tuple[int, int, int]]) -> None:
    samples = StepSamples()
    for tokens, batch, kv_tokens in steps:
        work = StepWork(tokens, 1, tokens, batch, kv_tokens)
        assert samples.add(work, 1000) == bool(tokens or batch)
        assert not samples.add(work, 0)
    assert len(samples.rows()) <= min(MAX_CELLS * STEPS_PER_CELL, len(steps))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_nonnegative_least_squares_meets_its_optimality_conditions(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    design = random.normal(size=(size + 3, size))
    gram, target = design.T @ design + 1e-6 * np.eye(size), design.T @ random.normal(size=size + 3)
    x = nonnegative(gram, target)
    slope = gram @ x - target
    assert (x >= 0).all() and (slope >= -1e-6).all() and np.abs(x * slope).max() < 1e-6


@given(models, st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.lists(st.integers(0, 9000), min_size=5))
def test_unequal_chunks_cost_their_squares_exactly(model: StepTimeModel, sizes: list[int], starts: list[int]) -> None:
    chunks = [(start, start + size) for size, start in zip(sizes, starts, strict=False)]
    work = chunks_work(chunks)
    pairs = sum(size * (start + size / 2) for size, start in zip(sizes, starts, strict=False))
    assert work.prefill_squared_tokens == 2 * pairs
    assert work.prefill_tokens == sum(sizes) and work.prefill_context_tokens == sum(end for _, end in chunks)
    expected = model.prefill_fixed_ns + model.prefill_token_ns * sum(sizes) + 2 * model.prefill_token_squared_ns * pairs
    assert model.prefill_ns(work) == pytest.approx(expected)


@given(models, st.builds(KindFit, st.integers(0, 10**9), st.floats(0, 1, width=32), st.floats(0, 9, width=32)))
def test_a_model_round_trips_over_the_wire(model: StepTimeModel, fit: KindFit) -> None:
    fitted = FittedModel(model, prefill=fit, mixed=fit)
    assert fitted_model(step_time_message(fitted)) == fitted


@pytest.mark.parametrize(
    ("name", "value"), [("prefill_token_ns", math.nan), ("decode_fixed_ns", -1), ("interference", 2)]
)
def test_an_invalid_message_gives_no_model(name: str, value: float) -> None:
    message = step_time_message(FittedModel(GPU))
    setattr(message, name, value)
    assert fitted_model(message) is None


def test_each_kind_is_taken_from_the_fit_that_knows_it() -> None:
    fits = {StepKind.PREFILL: FittedModel(GPU), StepKind.DECODE: FittedModel(CPU)}
    found = combine(PRIORS[0], fits)
    prefill, decode = StepWork(100, 1, 400), StepWork(decode_sequences=3, decode_kv_tokens=70)
    assert found.prefill_ns(prefill) == GPU.prefill_ns(prefill)
    assert found.decode_ns(decode) == CPU.decode_ns(decode)
    assert found.interference == PRIORS[0].interference


def test_a_fit_without_the_batches_of_its_device_leaves_them_as_they_are_known() -> None:
    older = replace(EAGER, saturating_sequences=0, decode_wide_ns=0, graph_sequences=0, graph_exit_ns=0)
    found = combine(EAGER, {StepKind.DECODE: FittedModel(older)})
    assert found == EAGER


def large_steps(truth: StepTimeModel, kinds: str, steps: int) -> StepSamples:
    """Return steps of up to 600 sequences, so that most decodes are beyond the large batches of the profile."""
    random, samples = np.random.default_rng(7), StepSamples()
    for index in range(steps):
        kind = kinds[index % len(kinds)]
        chunk = [(0, int(2 ** random.uniform(5, 11)))] if kind != DECODE else []
        batch = int(2 ** random.uniform(0, 9.2)) if kind != PREFILL else 0
        work = chunks_work(chunk, StepWork(decode_sequences=batch, decode_kv_tokens=400 * batch))
        samples.add(work, round(truth.step_ns(work) * math.exp(random.normal(0, 0.02))))
    return samples


H200 = profile("llama3.1-8b-h200-aic").step_time
PLAIN = replace(
    H200, saturating_sequences=0, decode_wide_ns=0, graph_sequences=0, graph_exit_ns=0, decode_sequence_ns=9_000,
    decode_matrix_ns=0, prefill_floor_ns=0, interference=0.1,
)  # fmt: skip


@pytest.mark.parametrize("kinds", [DECODE, DECODE + MIXED, PREFILL + DECODE + MIXED])
def test_a_worker_unlike_its_profile_unlearns_what_large_batches_cost(kinds: str) -> None:
    samples = large_steps(PLAIN, kinds, 600)
    found = fit_steps(H200, samples.rows())
    for batch in (16, 200, 400, 600):
        for tokens in (0, 256) if MIXED in kinds else (0,):
            work = chunks_work([(0, tokens)], StepWork(decode_sequences=batch, decode_kv_tokens=400 * batch))
            assert found.step_ns(work) == pytest.approx(PLAIN.step_ns(work), rel=0.06)
    assert found.decode_wide_ns < 0.1 * H200.decode_wide_ns


def test_what_was_unlearned_is_known_to_others_and_to_the_next_worker() -> None:
    unlearned = fit_steps(H200, large_steps(PLAIN, PREFILL + DECODE + MIXED, 600).rows())
    assert unlearned.saturating_sequences == unlearned.graph_sequences == UNREACHED_SEQUENCES
    fitted = FittedModel(unlearned, *[KindFit(600)] * 3)
    assert fitted_model(step_time_message(fitted)) == fitted
    assert combine(H200, dict.fromkeys(StepKind, fitted)) == unlearned


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_worker_like_its_profile_keeps_the_large_batches(factor: float) -> None:
    truth = H200.scaled(factor)
    found = fit_steps(H200, large_steps(truth, PREFILL + DECODE + MIXED, 600).rows())
    assert (found.saturating_sequences, found.graph_sequences) == (144, 512)
    assert found.decode_wide_ns == pytest.approx(truth.decode_wide_ns, rel=0.2)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_worker_like_its_profile_spends_no_time_on_fits_without_large_batches(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: StepTimeModel) -> StepTimeModel:
        raise AssertionError("a fit without large batches is tried")

    rows = large_steps(H200.scaled(factor), PREFILL + DECODE + MIXED, 600).rows()
    monkeypatch.setattr(StepTimeModel, "without_large_batches", refuse)
    fit_steps(H200, rows)


def test_large_batches_stay_known_while_none_is_measured() -> None:
    samples = StepSamples()
    for index in range(400):
        batch = 1 + index % 128
        work = StepWork(decode_sequences=batch, decode_kv_tokens=400 * batch)
        samples.add(work, round(1.2 * H200.step_ns(work)))
    found = fit_steps(H200, samples.rows())
    assert (found.saturating_sequences, found.graph_sequences) == (144, 512)
    assert found.decode_wide_ns > 0 and found.graph_exit_ns > 0


def test_the_jump_from_vectors_to_a_matrix_is_found_and_a_prompt_chunk_is_hidden_by_it() -> None:
    truth = StepTimeModel(55e6, 700_000, 200, 41e6, 900_000, 5_000, 0.1, decode_matrix_ns=16e6)
    found = fit_steps(CPU, measured(truth, PREFILL + DECODE + MIXED, 400).rows())
    assert found.decode_matrix_ns == pytest.approx(16e6, rel=0.25)
    few, batch = StepWork(64, 1, 64, MATRIX_ROWS - 1, 300), StepWork(64, 1, 64, MATRIX_ROWS, 300)
    assert truth.hidden_ns(batch) - truth.hidden_ns(few) == pytest.approx(0.9 * 16e6)
    assert np.median(errors(found, truth, DECODE + MIXED)) < 0.02


def test_what_large_batches_and_small_prompts_cost_is_learned_from_a_prior_that_knows_the_batches() -> None:
    prior = replace(EAGER, prefill_floor_ns=5e6, decode_wide_ns=10_000, graph_exit_ns=1e6)
    found = fit_steps(prior, measured(EAGER, PREFILL + DECODE + MIXED, 600).rows())
    assert found.graph_exit_ns == pytest.approx(9e6, rel=0.25)
    assert found.decode_wide_ns == pytest.approx(90_000, rel=0.25)
    assert found.prefill_floor_ns == pytest.approx(26e6, rel=0.1)
    assert np.median(errors(found, EAGER, PREFILL + DECODE + MIXED)) < 0.02


@pytest.mark.parametrize("kind", [PREFILL, DECODE, MIXED])
def test_columns_of_steps_are_predicted_as_each_step_is(kind: str) -> None:
    rows = measured(EAGER, kind, 60, noise=0.0).rows()
    assert predict(EAGER, rows) == pytest.approx(rows.duration_ns, abs=1)
    fitted = FittedModel(EAGER)
    assert fitted_model(step_time_message(fitted)) == fitted
