"""Properties of the step-time model and of the split of steps, over all sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import StartupError
from libs.perfmodel.profiles import PROFILES, profile, shipped_entries
from libs.policy.step_time import StepTimeModel, StepWork, split_step_ns

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
