"""FLOPs and bytes of steps, and their share of a device's peaks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.perfmodel import StepWork, chunks_work
from libs.perfmodel.peaks import PEAKS, gpu_peaks
from libs.perfmodel.utilisation import Compute, Effort, step_effort, utilisation
from libs.perfmodel.wire import compute_message, compute_of
from libs.telemetry.effort import EffortLog, effort_of
from libs.testing.telemetry import step, step_batch

LLAMA_8B = Compute(
    layer_parameters=6_979_321_856,
    head_parameters=525_336_576,
    parameter_bytes=2,
    attention_width=32 * 32 * 128,
    kv_token_bytes=131_072,
    peak_flops_per_s=989.4e12,
    peak_bytes_per_s=3.35e12,
)


def test_a_prompt_costs_two_flops_a_parameter_and_token_and_its_causal_attention() -> None:
    effort = step_effort(LLAMA_8B, chunks_work([(0, 1000)]), 1.0)
    pairs = 1000 * 1000 / 2
    expected = 2 * 6_979_321_856 * 1000 + 2 * 525_336_576 + 4 * 131_072 * pairs
    assert effort.prefill_flops == pytest.approx(expected)
    assert (effort.decode_flops, effort.decode_bytes) == (0, 0)


def test_a_decode_step_reads_the_weights_once_and_every_sequences_kv() -> None:
    effort = step_effort(LLAMA_8B, StepWork(decode_sequences=8, decode_kv_tokens=8000), 0.0)
    assert effort.decode_bytes == 2 * (6_979_321_856 + 525_336_576) + 131_072 * 8008
    assert effort.decode_flops == pytest.approx(2 * 8 * (6_979_321_856 + 525_336_576) + 4 * 131_072 * 8000)
    assert utilisation(effort.decode_bytes, 3.35e12, 10_000_000) == pytest.approx(0.479, abs=0.001)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=6), st.floats(0, 1))
def test_attention_costs_the_same_however_a_prompt_is_cut(sizes: list[int], share: float) -> None:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    cut = [
        step_effort(LLAMA_8B, chunks_work([(end - size, end)]), share) for size, end in zip(sizes, ends, strict=True)
    ]
    whole = step_effort(LLAMA_8B, chunks_work([(0, ends[-1])]), share)
    heads = 2 * LLAMA_8B.head_parameters * (len(sizes) - 1)
    assert sum(each.prefill_flops for each in cut) - heads == pytest.approx(whole.prefill_flops)
    both = whole.prefill_bytes + whole.decode_bytes
    assert both == pytest.approx(LLAMA_8B.weight_bytes + 131_072 * 2 * ends[-1])


def test_unknown_peaks_and_unspent_time_have_no_utilisation() -> None:
    assert utilisation(1e9, 0, 1000) is None
    assert utilisation(0, 1e12, 0) is None


@pytest.mark.parametrize(
    ("name", "tera_flops", "tera_bytes"),
    [
        ("NVIDIA H200", 989.4, 4.8),
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35),
        ("NVIDIA H100 PCIe", 756.0, 2.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2.039),
        ("NVIDIA A100-SXM4-40GB", 312.0, 1.555),
        ("NVIDIA A10G", 70.0, 0.6),
        ("Tesla T4", 65.0, 0.32),
        ("NVIDIA Something", 0.0, 0.0),
    ],
)
def test_gpus_are_known_by_their_drivers_names(name: str, tera_flops: float, tera_bytes: float) -> None:
    assert gpu_peaks(name) == (tera_flops * 1e12, tera_bytes * 1e12)


def test_no_name_could_mean_two_gpus() -> None:
    for words in PEAKS:
        assert gpu_peaks("NVIDIA " + " ".join(words)) == (PEAKS[words][0] * 1e12, PEAKS[words][1] * 1e12)


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 80)), max_size=20)


@given(spans, st.lists(st.integers(0, 3000), min_size=2, max_size=6))
def test_windows_that_touch_add_to_the_whole(steps: list[tuple[int, int]], cuts: list[int]) -> None:
    log, at = EffortLog(), 0
    for gap, length in steps:
        log.add(at + gap, at + gap + length, Effort(length, 1, 2, 3))
        log.add(at + gap, at + gap + length, Effort(9, 9, 9, 9))
        at += gap + length
    assert log.within(0, 10**6).prefill_flops == pytest.approx(sum(length for _, length in steps))
    cuts = sorted({0, *cuts, 10**6})
    parts = [log.within(low, high) for low, high in pairwise(cuts)]
    assert sum(part.decode_bytes for part in parts) == pytest.approx(3 * len(steps))
    log.forget_before(at // 2)
    log.forget_from(at // 2)
    assert len(log) == 0 and log.within(0, 10**6) == Effort()


def test_a_shape_comes_back_from_the_wire_and_a_batch_without_one_has_no_effort() -> None:
    assert compute_of(compute_message(LLAMA_8B)) == LLAMA_8B
    message = compute_message(LLAMA_8B)
    message.peak_flops_per_s = float("nan")
    assert compute_of(message) is None
    batch: StepBatch = step_batch(1, (0, 100), [step(0, 10, decode=4)])
    assert effort_of(batch) is None
