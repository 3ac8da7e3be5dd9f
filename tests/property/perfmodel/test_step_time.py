"""Properties of the step-time model and of the split of steps, over all sizes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import StartupError
from libs.lab.cluster.time import StepDurations
from libs.lab.hardware import resolve
from libs.perfmodel.profiles import PROFILES, profile, shipped_entries
from libs.policy.step_time import StepTimeModel, StepWork, chunks_work, split_step_ns
from libs.policy.worker.pace import TokenLine, prefill_chunk, step_limit_ns
from libs.policy.worker.saturation import knee_of, prefill_tokens_per_s

models = st.builds(
    StepTimeModel,
    *(st.floats(0, 1e8, allow_nan=False) for _ in range(6)),
    interference=st.floats(0, 1, allow_nan=False),
    decode_matrix_ns=st.floats(0, 1e8, allow_nan=False),
)


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    """Draw any step: prompt chunks with cached context, decodes, both or neither."""
    chunks = draw(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 100_000)), max_size=4))
    decodes = draw(st.lists(st.integers(1, 100_000), max_size=8))
    return StepWork(sum(tokens for tokens, _ in chunks), len(chunks), sum(map(sum, chunks)), len(decodes), sum(decodes))


@given(models, works(), st.integers(0, 2**62))
def test_the_split_adds_up_exactly_and_gives_nothing_to_absent_work(
    model: StepTimeModel, work: StepWork, duration_ns: int
) -> None:
    prefill, decode = split_step_ns(model, work, duration_ns)
    assert prefill + decode == duration_ns
    assert prefill >= 0 and decode >= 0
    if not work.prefill_tokens:
        assert prefill == 0
    elif not work.decode_sequences:
        assert decode == 0


@given(models, works())
def test_a_mixed_step_takes_between_its_more_expensive_part_and_the_sum(model: StepTimeModel, work: StepWork) -> None:
    prefill, decode = model.prefill_ns(work), model.decode_ns(work)
    assert max(prefill, decode) <= model.step_ns(work) <= (prefill + decode) * (1 + 1e-9)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_chunks_of_a_prompt_cost_its_square_and_linear_part_once(sizes: list[int]) -> None:
    model = StepTimeModel(0, 3, 2, 0, 0, 0, 1)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    chunked = sum(model.prefill_ns(StepWork(n, 1, end)) for n, end in zip(sizes, ends, strict=True))
    whole = model.prefill_ns(StepWork(sum(sizes), 1, sum(sizes)))
    assert chunked == pytest.approx(whole)


def test_the_split_follows_the_models_cost_of_the_two_parts() -> None:
    model = StepTimeModel(0, 10, 0, 0, 30, 0, 0)
    assert split_step_ns(model, StepWork(3, 1, 3, 2, 20), 900) == (300, 600)


def test_a_free_model_splits_by_tokens() -> None:
    assert split_step_ns(PROFILES["instant"].step_time, StepWork(3, 1, 3, 1, 20), 400) == (300, 100)


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError, match="llama-70b-tp4-h100"):
        profile("b200")


def test_shipped_profiles_are_complete_and_cover_many_devices() -> None:
    entries = shipped_entries()
    assert len(entries) >= 60 and len({entry["device"] for entry in entries.values()}) >= 10
    for name, entry in entries.items():
        found = profile(name)
        values = [getattr(found.step_time, field) for field in StepTimeModel.__dataclass_fields__]
        assert all(value >= 0 for value in values) and found.step_time.interference <= 1, name
        assert found.kv_memory_bytes > 10**9 and entry["source"] and entry["error"], name
        decode = found.step_time.decode_ns(StepWork(decode_sequences=8, decode_kv_tokens=8192))
        assert 1e6 < decode < 1e8, name


def test_a_misspelt_profile_gets_a_suggestion() -> None:
    with pytest.raises(StartupError, match=r"qwen2\.5-7b-h100"):
        profile("qwen2-7b-h100")


batches = st.integers(1, 1_000)
costs = st.floats(0, 1e8, allow_nan=False)
large = st.builds(
    StepTimeModel,
    *(costs for _ in range(6)),
    interference=st.floats(0, 1, allow_nan=False),
    prefill_floor_ns=costs,
    decode_matrix_ns=costs,
    saturating_sequences=batches,
    decode_wide_ns=costs,
    graph_sequences=batches,
    graph_exit_ns=costs,
)


@given(large, works())
def test_a_known_saturating_batch_keeps_mixed_steps_between_their_dearer_part_and_the_sum(
    model: StepTimeModel, work: StepWork
) -> None:
    prefill, decode = model.prefill_ns(work), model.decode_ns(work)
    assert max(prefill, decode) <= model.step_ns(work) * (1 + 1e-9)
    assert model.step_ns(work) <= (prefill + decode) * (1 + 1e-9)
    assert model.hidden_ns(work) == pytest.approx(prefill + decode - model.step_ns(work))


@given(large, st.integers(1, 2_000), st.floats(0, 1e9), st.integers(0, 9_000))
def test_chunks_of_the_greatest_part_fill_the_step(
    model: StepTimeModel, sequences: int, step_ns: float, tokens: int
) -> None:
    decode_ns = model.decode_ns(StepWork(decode_sequences=sequences, decode_kv_tokens=tokens))
    hiding_ns = model.hiding_ns(sequences)
    most_ns = model.most_prefill_ns(step_ns, decode_ns, hiding_ns)
    if most_ns > 0 and step_ns >= decode_ns:
        assert model.mixed_ns(most_ns, decode_ns, hiding_ns) <= step_ns * (1 + 1e-9) + 1e-3
        assert model.mixed_ns(most_ns * 1.01 + 1, decode_ns, hiding_ns) > step_ns * (1 - 1e-9) - 1e-3


@given(large, st.integers(1, 2_000), st.integers(0, 10**6))
def test_decode_steps_of_the_lab_are_whole_sums_of_the_same_costs(
    model: StepTimeModel, sequences: int, kv_tokens: int
) -> None:
    work = StepWork(decode_sequences=sequences, decode_kv_tokens=kv_tokens)
    durations = StepDurations(model)
    assert durations.step_ps(work) == pytest.approx(model.step_ns(work) * 1_000, rel=1e-9, abs=2_000_000)
    coast = durations.coast(0, sequences, kv_tokens)
    ends = [coast.end_ps(steps) for steps in range(4)]
    singly = [durations.decode_ps(sequences, kv_tokens + steps * sequences) for steps in range(3)]
    assert [end - start for start, end in pairwise(ends)] == singly


def test_a_small_prompt_pays_for_the_graph_that_it_leaves_and_a_long_one_does_not() -> None:
    """Outside a graph the host launches each kernel. The device computes meanwhile, so only short steps wait for it."""
    model = StepTimeModel(2e6, 20_000, 0, 5e6, 10_000, 30, 0, prefill_floor_ns=16e6, saturating_sequences=150)
    decodes = StepWork(decode_sequences=16, decode_kv_tokens=16_000)
    small, long = (chunks_work([(0, tokens)], decodes) for tokens in (64, 4_096))
    assert model.step_ns(decodes) < 6e6
    assert model.step_ns(small) == 16e6
    assert model.step_ns(long) < model.prefill_ns(long) + model.decode_ns(decodes) < 95e6


def test_a_batch_beyond_the_largest_graph_pays_once_and_beyond_the_saturating_one_for_each_sequence() -> None:
    model = replace(
        StepTimeModel(0, 1, 0, 5e6, 10_000, 0, 0),
        saturating_sequences=100, decode_wide_ns=5_000, graph_sequences=512, graph_exit_ns=1e6,
    )  # fmt: skip
    took = {batch: model.decode_ns(StepWork(decode_sequences=batch)) for batch in (100, 101, 512, 513)}
    assert took[101] - took[100] == pytest.approx(15_000)
    assert took[513] - took[512] == pytest.approx(1_015_000)
    assert model.hiding_ns(50) == pytest.approx(2.5e6) and model.hiding_ns(100) == 0


@given(large, st.floats(0.01, 100))
def test_a_slower_device_is_slower_for_equal_batches(model: StepTimeModel, factor: float) -> None:
    slow = model.scaled(factor)
    work = StepWork(64, 1, 64, 600, 600_000)
    assert slow.step_ns(work) == pytest.approx(factor * model.step_ns(work))
    assert (slow.saturating_sequences, slow.graph_sequences) == (model.saturating_sequences, model.graph_sequences)


def test_the_eager_profile_prices_a_small_prompt_and_is_not_chosen_unasked() -> None:
    compiled, eager = (profile(f"llama3.1-8b-h200-aic{variant}").step_time for variant in ("", "-eager"))
    decodes, small = StepWork(decode_sequences=16, decode_kv_tokens=8_000), StepWork(64, 1, 64, 16, 8_000)
    assert compiled.step_ns(decodes) == eager.step_ns(decodes)
    assert eager.step_ns(small) > 2.5 * compiled.step_ns(small)
    assert resolve("llama3.1-8b", "h200").profile == profile("llama3.1-8b-h200-aic")


def test_a_price_for_small_prompts_enlarges_the_measured_chunk() -> None:
    model = profile("llama3.1-8b-h200-aic").step_time
    costly = replace(model, prefill_floor_ns=100e6)
    chunk, plateau = knee_of(model, 8_192)
    assert knee_of(costly, 8_192)[0] > 1.5 * chunk
    assert prefill_tokens_per_s(costly, chunk) < 0.7 * plateau


@pytest.mark.parametrize("batch", [16, 144, 400, 700])
def test_a_budget_beside_decodes_knows_what_the_step_costs_outside_the_graph(batch: int) -> None:
    """A target below the floor leaves no prompt token, and any other one is kept with the most tokens that fit."""
    model = profile("llama3.1-8b-h200-aic-eager").step_time
    decodes = StepWork(decode_sequences=batch, decode_kv_tokens=300 * batch)
    for tpot_ns in (12_000_000, 20_000_000, 26_000_000, 60_000_000):
        lines = [TokenLine(0, tpot_ns, 0)]
        tokens = prefill_chunk(model, decodes, lines, [(0, 4_096)], most_tokens=2_048, waited_ns=0, now_ns=0)
        limit_ns = step_limit_ns(model.decode_ns(decodes), lines, now_ns=0)
        took_ns = [model.step_ns(chunks_work([(0, size)], decodes)) for size in (max(tokens, 1), tokens + 1)]
        if tokens:
            assert took_ns[0] <= limit_ns
        assert tokens == 2_048 or took_ns[1] > limit_ns
