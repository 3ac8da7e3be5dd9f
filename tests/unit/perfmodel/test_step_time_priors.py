"""Tests of step times assumed before a worker has run a step, against stated and measured profiles."""

from dataclasses import fields, replace

import pytest

from libs.perfmodel.profiles import PROFILES, prior_step_time, profile
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
