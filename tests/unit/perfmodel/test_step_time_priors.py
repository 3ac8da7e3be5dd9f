"""Tests of step times assumed before a worker has run a step, against stated and measured profiles."""

from dataclasses import fields, replace

import pytest

from libs.perfmodel.profiles import (
    PROFILES,
    VARIANT_EAGER,
    VARIANT_UNCOMPILED,
    _roofline,
    prior_speed,
    prior_step_time,
    profile,
)
from libs.perfmodel.utilisation import Compute, gpu_peaks
from libs.policy.step_time import StepTimeModel, StepWork

BF16 = 2


def shape(gpu: str, parameters: float, layers: int, width: int, kv_heads: int) -> Compute:
    """A dense model with heads of 128 in bfloat16, on one GPU."""
    flops_per_s, bytes_per_s = gpu_peaks(gpu)
    return Compute(
        layer_parameters=int(parameters),
        head_parameters=0,
        parameter_bytes=BF16,
        attention_width=layers * width,
        kv_token_bytes=2 * layers * kv_heads * 128 * BF16,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=bytes_per_s,
    )


LLAMA_8B = shape("NVIDIA H100 80GB HBM3", 8.03e9, 32, 4096, 8)
PROMPT = StepWork(prefill_tokens=2048, prefill_sequences=1, prefill_context_tokens=2048)
DECODES = StepWork(decode_sequences=32, decode_kv_tokens=32 * 1000)


def test_the_prediction_for_a_known_model_on_a_known_gpu_equals_its_profile() -> None:
    prior = prior_step_time("vllm", "cuda:NVIDIA H100 80GB HBM3", LLAMA_8B)
    stated = PROFILES["llama-8b-h100"].step_time
    for field in fields(StepTimeModel):
        assert getattr(prior, field.name) == pytest.approx(getattr(stated, field.name), rel=0.03, abs=1e-9), field.name


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "model"),
    [
        ("llama-70b-tp4-h100", "NVIDIA H100 80GB HBM3", 4, (70.6e9, 80, 8192, 8)),
        ("llama3.1-70b-h200-tp2-aic", "NVIDIA H200", 2, (70.6e9, 80, 8192, 8)),
        ("llama3.1-70b-a100-tp4-aic", "NVIDIA A100-SXM4-80GB", 4, (70.6e9, 80, 8192, 8)),
        ("llama2-13b-a100", "NVIDIA A100-SXM4-80GB", 1, (13e9, 40, 5120, 40)),
        ("llama2-7b-a10", "NVIDIA A10", 1, (6.74e9, 32, 4096, 32)),
    ],
)
def test_predictions_for_other_models_and_gpus_are_closer_than_one_profile_for_all(
    name: str, gpu: str, gpus: int, model: tuple[float, int, int, int]
) -> None:
    prior = prior_step_time("vllm", f"cuda:{gpu}", shape(gpu, *model), gpus)
    for work in (PROMPT, DECODES):
        measured_ns = profile(name).step_time.step_ns(work)
        assert 0.5 < prior.step_ns(work) / measured_ns < 2, work
        without = prior_step_time("vllm", f"cuda:{gpu}").step_ns(work)
        assert abs(prior.step_ns(work) - measured_ns) < abs(without - measured_ns)


def test_without_known_peaks_the_nearest_profile_is_used() -> None:
    unknown = replace(LLAMA_8B, peak_flops_per_s=0.0)
    assert prior_step_time("vllm", "cuda:NVIDIA X", unknown) == PROFILES["llama-8b-h100"].step_time
    assert prior_step_time("torch", "cpu", LLAMA_8B) == PROFILES["smollm2-135m-cpu"].step_time


H200 = "cuda:NVIDIA H200"
# Llama 3.1 8B as vLLM counts it.
LLAMA_31_8B = replace(shape("NVIDIA H200", 6_979_321_856, 32, 4096, 8), head_parameters=525_336_576)
QWEN3_8B = replace(shape("NVIDIA H200", 6_945_767_424, 36, 4096, 8), head_parameters=622_329_856)
BATCHES = {"saturating_sequences", "decode_wide_ns", "graph_sequences", "graph_exit_ns"}


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("", "llama3.1-8b-h200-aic"),
        ("bfloat16, vllm 0.32.0", "llama3.1-8b-h200-aic"),
        (f"bfloat16, vllm 0.32.0, {VARIANT_UNCOMPILED}", "llama3.1-8b-h200-aic-eager"),
    ],
)
def test_a_vllm_worker_starts_from_the_profile_measured_with_its_gpu_and_model(variant: str, name: str) -> None:
    prior = prior_step_time("vllm", H200, LLAMA_31_8B, variant=variant)
    assert prior == profile(name).step_time
    assert prior_speed("vllm", H200, 2048, LLAMA_31_8B, variant=variant).step_time == prior
    assert prior.saturating_sequences and prior.decode_wide_ns and prior.graph_sequences and prior.graph_exit_ns


def test_a_model_like_the_measured_one_has_its_large_batches_scaled_to_its_shape() -> None:
    known, prior = profile("llama3.1-8b-h200-aic").step_time, prior_step_time("vllm", H200, QWEN3_8B)
    assert (prior.saturating_sequences, prior.graph_sequences) == (known.saturating_sequences, known.graph_sequences)
    assert prior.decode_wide_ns == pytest.approx(
        known.decode_wide_ns * QWEN3_8B.layer_parameters / LLAMA_31_8B.layer_parameters
    )
    assert prior.graph_exit_ns == known.graph_exit_ns, "the host launches as many kernels"
    stated = profile("qwen3-8b-h200-aic").step_time
    for work in (PROMPT, DECODES):
        assert prior.step_ns(work) == pytest.approx(stated.step_ns(work), rel=0.08)


def test_larger_weights_raise_the_floor_only_if_reading_them_sets_it() -> None:
    compiled, uncompiled = (profile(f"llama3.1-8b-h200-aic{tail}").step_time for tail in ("", "-eager"))
    scaled = prior_step_time("vllm", H200, QWEN3_8B).prefill_floor_ns / compiled.prefill_floor_ns
    assert scaled == pytest.approx(QWEN3_8B.weight_bytes / LLAMA_31_8B.weight_bytes) != 1
    launching = prior_step_time("vllm", H200, QWEN3_8B, variant=VARIANT_UNCOMPILED)
    assert launching.prefill_floor_ns == uncompiled.prefill_floor_ns
    assert launching.decode_fixed_ns != uncompiled.decode_fixed_ns


@pytest.mark.parametrize(
    ("engine", "gpu", "compute", "gpus", "variant"),
    [
        ("torch", "NVIDIA H200", LLAMA_31_8B, 1, ""),
        ("vllm", "NVIDIA H200", LLAMA_31_8B, 2, ""),
        ("vllm", "NVIDIA H200", LLAMA_31_8B, 1, f"bfloat16, {VARIANT_EAGER}, vllm 0.32.0"),
        ("vllm", "NVIDIA H200 NVL", shape("NVIDIA H200 NVL", 6_979_321_856, 32, 4096, 8), 1, ""),
        ("vllm", "NVIDIA H100 80GB HBM3", LLAMA_8B, 1, ""),
        ("vllm", "NVIDIA H200", shape("NVIDIA H200", 70.6e9, 80, 8192, 8), 1, ""),
        ("vllm", "NVIDIA H200", replace(LLAMA_31_8B, layer_parameters=3_000_000_000), 1, ""),
        ("vllm", "NVIDIA H200", replace(LLAMA_31_8B, kv_token_bytes=65_536), 1, ""),
        ("vllm", "NVIDIA H200", replace(LLAMA_31_8B, kv_window_token_bytes=65_536, kv_window_tokens=4_096), 1, ""),
        ("vllm", "NVIDIA H200", replace(LLAMA_31_8B, parameter_bytes=1), 1, ""),
    ],
)
def test_a_worker_unlike_any_measured_one_starts_from_a_roofline(
    engine: str, gpu: str, compute: Compute, gpus: int, variant: str
) -> None:
    prior = prior_step_time(engine, f"cuda:{gpu}", compute, gpus, variant=variant)
    assert prior == _roofline(compute, gpus)
    assert not any(getattr(prior, name) for name in BATCHES)
