"""Properties of FLOPs and bytes of steps, and of their share of a device's peaks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.perfmodel.utilisation import PEAKS, Compute, Effort, effort_of, gpu_peaks, utilisation
from libs.perfmodel.wire import compute_message, compute_of
from libs.policy.step_time import StepWork, chunks_work
from libs.telemetry.columns import prefill_shares
from libs.telemetry.steps import FULL_SHARE, StepCounts, StepLog, effort_within
from libs.telemetry.timeline import Timeline
from libs.testing.workers.telemetry import at, step, step_batch

LLAMA_8B = Compute(
    layer_parameters=6_979_321_856,
    head_parameters=525_336_576,
    parameter_bytes=2,
    attention_width=32 * 32 * 128,
    kv_token_bytes=131_072,
    peak_flops_per_s=989.4e12,
    peak_bytes_per_s=3.35e12,
)


def step_effort(work: StepWork, share: float) -> Effort:
    """Return the effort of one step."""
    return effort_of(LLAMA_8B, work, prefill_steps=share, decode_steps=1 - share)


def test_a_prompt_costs_two_flops_per_parameter_and_token_plus_its_causal_attention() -> None:
    effort = step_effort(chunks_work([(0, 1000)]), 1.0)
    pairs = 1000 * 1000 / 2
    expected = 2 * 6_979_321_856 * 1000 + 2 * 525_336_576 + 4 * 131_072 * pairs
    assert effort.prefill_flops == pytest.approx(expected)
    assert (effort.decode_flops, effort.decode_bytes) == (0, 0)


def test_a_decode_step_reads_the_weights_once_and_every_sequences_kv() -> None:
    effort = step_effort(StepWork(decode_sequences=8, decode_kv_tokens=8000), 0.0)
    assert effort.decode_bytes == 2 * (6_979_321_856 + 525_336_576) + 131_072 * 8008
    assert effort.decode_flops == pytest.approx(2 * 8 * (6_979_321_856 + 525_336_576) + 4 * 131_072 * 8000)
    assert utilisation(effort.decode_bytes, 3.35e12, 10_000_000) == pytest.approx(0.479, abs=0.001)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=6), st.floats(0, 1))
def test_attention_costs_the_same_however_a_prompt_is_cut(sizes: list[int], share: float) -> None:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    cut = [step_effort(chunks_work([(end - size, end)]), share) for size, end in zip(sizes, ends, strict=True)]
    whole = step_effort(chunks_work([(0, ends[-1])]), share)
    heads = 2 * LLAMA_8B.head_parameters * (len(sizes) - 1)
    assert sum(each.prefill_flops for each in cut) - heads == pytest.approx(whole.prefill_flops)
    both = whole.prefill_bytes + whole.decode_bytes
    assert both == pytest.approx(LLAMA_8B.weight_bytes + 131_072 * 2 * ends[-1])


def test_unknown_peaks_and_unused_time_have_no_utilisation() -> None:
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
def test_gpus_are_recognised_by_their_drivers_names(name: str, tera_flops: float, tera_bytes: float) -> None:
    assert gpu_peaks(name) == (tera_flops * 1e12, tera_bytes * 1e12)


def test_no_name_matches_two_gpus() -> None:
    for words in PEAKS:
        assert gpu_peaks("NVIDIA " + " ".join(words)) == (PEAKS[words][0] * 1e12, PEAKS[words][1] * 1e12)


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 80)), max_size=20)


@given(spans, st.lists(st.integers(0, 3000), min_size=2, max_size=6))
def test_adjacent_windows_add_up_to_the_whole(steps: list[tuple[int, int]], cuts: list[int]) -> None:
    log, at = StepLog(), 0
    for gap, length in steps:
        log.add(at + gap, at + gap + length, FULL_SHARE // 2, StepCounts(length, 1, length, 3, 100))
        at += gap + length

    def within(low: int, high: int) -> Effort:
        return effort_within(LLAMA_8B, log.finished(low, high), low, high)

    works = [StepWork(length, 1, length, 3, 100) for _, length in steps]
    whole = [step_effort(work, 0.5) for work in works]
    assert within(0, 10**6).prefill_flops == pytest.approx(sum(each.prefill_flops for each in whole))
    cuts = sorted({0, *cuts, 10**6})
    parts = [within(low, high) for low, high in pairwise(cuts)]
    assert sum(part.decode_bytes for part in parts) == pytest.approx(sum(each.decode_bytes for each in whole))


def test_an_announced_step_and_one_without_duration_have_no_effort() -> None:
    log = StepLog()
    log.add(5, 5, 0, StepCounts(decode_sequences=1))
    log.add(10, 90, 0, StepCounts(decode_sequences=1), announced=True)
    assert effort_within(LLAMA_8B, log.finished(0, 100), 0, 100) == Effort()
    log.add(10, 60, 0, StepCounts(decode_sequences=1))
    assert effort_within(LLAMA_8B, log.finished(0, 100), 0, 100).decode_bytes == LLAMA_8B.weight_bytes + 131_072


def test_a_truncated_step_has_no_effort_and_the_columns_stay_aligned() -> None:
    log = StepLog()
    for number in range(6):
        log.add(100 * number, 100 * number + 90, 0, StepCounts(decode_sequences=number + 1))
    log.add(600, 610, FULL_SHARE, StepCounts(prefill_tokens=4096, prefill_sequences=1), announced=True)
    log.settle(lambda point: point + 1)
    assert effort_within(LLAMA_8B, log.finished(600, 700), 600, 700) == Effort()
    log.forget_before(190)
    log.forget_from(450)
    reported = [(step.start_ns, step.counts.decode_sequences) for step in log.ran(0, 1000, int)]
    assert reported == [(200, 3), (300, 4), (400, 0)]
    assert effort_within(LLAMA_8B, log.finished(400, 500), 400, 500) == Effort()
    kv = effort_within(LLAMA_8B, log.finished(0, 1000), 0, 1000).decode_bytes - 2 * LLAMA_8B.weight_bytes
    assert kv == pytest.approx(7 * LLAMA_8B.kv_token_bytes)


def test_a_shape_round_trips_over_the_wire() -> None:
    assert compute_of(compute_message(LLAMA_8B)) == LLAMA_8B
    message = compute_message(LLAMA_8B)
    message.peak_flops_per_s = float("nan")
    assert compute_of(message) is None


def test_steps_count_from_the_report_of_their_workers_shape_on() -> None:
    timeline = Timeline(prefill_shares)
    for number in range(4):
        batch = step_batch(
            number, (100 * number, 100 * number + 100), [step(100 * number, 100 * number + 50, decode=4)]
        )
        if number >= 2:
            batch.compute.CopyFrom(compute_message(LLAMA_8B))
        timeline.add(batch)
    one = step_effort(StepWork(decode_sequences=4, decode_kv_tokens=400), 0.0)
    assert timeline.efforts_from_ns == at(200)
    assert timeline.effort(at(0), at(200)) == Effort()
    assert timeline.effort(at(0), at(400)).decode_flops == pytest.approx(2 * one.decode_flops)
