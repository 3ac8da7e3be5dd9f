"""Tests of the bytes of a sequence's KV by the kinds of a model's layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.perfmodel.utilisation import Compute, KvGroup, KvShape, effort_of
from libs.policy.step_time import StepWork, chunks_work

LAYER_TOKEN_BYTES = 2 * 8 * 64 * 2
"""gpt-oss: keys and values of 8 heads of 64 numbers of 2 bytes."""
WHOLE = KvGroup(64, 18 * 64 * LAYER_TOKEN_BYTES)
WINDOWED = KvGroup(64, 18 * 64 * LAYER_TOKEN_BYTES, window_tokens=128)
GPT_OSS = KvShape((WHOLE, WINDOWED))


def test_a_long_sequence_grows_only_in_layers_with_full_attention() -> None:
    assert GPT_OSS.block_bytes(64) == 18 * 64 * LAYER_TOKEN_BYTES
    assert GPT_OSS.sequence_bytes(64_000) - GPT_OSS.sequence_bytes(32_000) == 500 * GPT_OSS.block_bytes(64)
    assert GPT_OSS.sequence_bytes(32_000) == 503 * 64 * 18 * LAYER_TOKEN_BYTES


def test_a_sequence_within_the_window_has_its_blocks_in_all_layers() -> None:
    assert GPT_OSS.sequence_bytes(65) == 2 * 64 * 36 * LAYER_TOKEN_BYTES


def test_a_state_is_stored_once_whatever_the_length_of_the_sequence() -> None:
    shape = KvShape((KvGroup(16, 1600),), state_bytes=70_000)
    assert (shape.sequence_bytes(1), shape.sequence_bytes(160)) == (71_600, 86_000)
    assert shape.block_bytes(16) == 1600


def test_groups_with_blocks_of_different_lengths_are_summed_per_token() -> None:
    shape = KvShape((KvGroup(16, 1600), KvGroup(32, 1600)))
    assert (shape.token_bytes, shape.block_bytes(32)) == (150, 4800)


def test_a_model_with_only_windows_grows_as_a_short_sequence_does() -> None:
    assert KvShape((WINDOWED,)).block_bytes(64) == WINDOWED.block_bytes


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(0, 2_000))
def test_more_tokens_never_take_less(one: int, other: int, window: int) -> None:
    shape = KvShape((KvGroup(16, 3), KvGroup(32, 5, window)), 7)
    short, long = sorted((one, other))
    assert shape.sequence_bytes(short) <= shape.sequence_bytes(long)


def compute(shape: KvShape, width: int = 36 * 64 * 64) -> Compute:
    return Compute(
        0, 0, 2, width, shape.token_bytes, 0, 0,
        shape.window_token_bytes, shape.window_tokens, shape.state_bytes,
    )  # fmt: skip


def test_a_decode_step_reads_windows_only_up_to_their_length() -> None:
    found = effort_of(
        compute(GPT_OSS), StepWork(decode_sequences=2, decode_kv_tokens=8_000), prefill_steps=0, decode_steps=0
    )
    assert found.decode_bytes == 18 * LAYER_TOKEN_BYTES * (8_002 + 2 * 128)
    assert found.decode_flops == pytest.approx(4 * 64 * 64 * (18 * 8_000 + 18 * 2 * 128))


def test_short_contexts_are_read_completely_even_by_windows() -> None:
    whole = KvShape((KvGroup(64, 36 * 64 * LAYER_TOKEN_BYTES),))
    work = StepWork(decode_sequences=4, decode_kv_tokens=400)
    windowed, full = (effort_of(compute(each), work, prefill_steps=0, decode_steps=0) for each in (GPT_OSS, whole))
    assert windowed.decode_bytes == full.decode_bytes
    assert windowed.decode_flops == pytest.approx(full.decode_flops)


def test_a_prompts_windows_cost_in_proportion_to_its_length() -> None:
    flops = [
        effort_of(compute(GPT_OSS), chunks_work([(0, tokens)]), prefill_steps=0, decode_steps=0).prefill_flops
        for tokens in (100, 10_000)
    ]
    assert flops[0] == pytest.approx(4 * 64 * 64 * 36 * 100**2 / 2)
    assert flops[1] == pytest.approx(4 * 64 * 64 * (18 * 10_000**2 / 2 + 18 * 10_000 * 128))


def test_every_step_reads_the_states_of_its_sequences() -> None:
    shape = KvShape((KvGroup(16, 1600),), state_bytes=70_000)
    work = StepWork(decode_sequences=3, decode_kv_tokens=300)
    found = effort_of(compute(shape), work, prefill_steps=0, decode_steps=0)
    assert found.decode_bytes == 303 * 100 + 3 * 70_000
