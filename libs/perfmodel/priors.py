"""What is believed of a worker's step times before it has run a step. Pure."""

from dataclasses import replace
from typing import Final

from libs.contracts.errors import StartupError
from libs.perfmodel.profiles import PROFILES, profile
from libs.perfmodel.utilisation import Compute
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel

DATACENTER_PROFILE: Final = "llama-8b-h100"
LAPTOP_PROFILE: Final = "smollm2-135m-cpu"
MULTIPLYING, ATTENTION, READING = 0.6, 0.4, 0.75
"""Shares of a GPU's peaks that steps reach, as DATACENTER_PROFILE has them; `_TOGETHER` of them where GPUs share a
model, as between llama-70b-tp4-h100 and a single GPU."""
_TOGETHER: Final = 0.9
DECODE_LAUNCHES_NS: Final = 0.6e6
SPEEDUPS: Final = (1e-6, 1e9)
"""A simulated device named as any slower or faster is taken for one as it is."""


def prior_step_time(engine: str, device: str = "", compute: Compute | None = None, gpus: int = 1) -> StepTimeModel:
    """A roofline of the model's shape on `gpus` GPUs whose peaks are known, else the nearest profile's model.

    Devices are "cpu", "cuda:NVIDIA H200", "sim:llama-8b-h100", "sim:llama-8b-h100/x50" (50 times as fast), or unknown.
    """
    if engine == "sim":
        return _simulated(device.removeprefix("sim:"))
    if device.startswith("cuda") and compute and compute.peak_flops_per_s > 0 and compute.peak_bytes_per_s > 0:
        return _roofline(compute, gpus)
    on_gpu = device.startswith("cuda") or (not device and engine != "torch")
    return PROFILES[DATACENTER_PROFILE if on_gpu else LAPTOP_PROFILE].step_time


def prior_speed(engine: str, device: str, chunk_tokens: int, compute: Compute | None = None, gpus: int = 1) -> Speed:
    """What to believe of a worker before it has said anything."""
    return Speed(prior_step_time(engine, device, compute, gpus), max(chunk_tokens, 1))


def _roofline(compute: Compute, gpus: int) -> StepTimeModel:
    """What does not follow from FLOPs and bytes, launches above all, is as in DATACENTER_PROFILE."""
    like = PROFILES[DATACENTER_PROFILE].step_time
    reached = gpus * (_TOGETHER if gpus > 1 else 1.0)
    flops_per_ns = compute.peak_flops_per_s * reached / 1e9
    bytes_per_ns = compute.peak_bytes_per_s * reached / 1e9 * READING
    return replace(
        like,
        prefill_token_ns=2.0 * compute.layer_parameters / (flops_per_ns * MULTIPLYING),
        prefill_token_squared_ns=2.0 * compute.attention_width / (flops_per_ns * ATTENTION),
        decode_fixed_ns=DECODE_LAUNCHES_NS + compute.weight_bytes / bytes_per_ns,
        decode_kv_token_ns=compute.kv_token_bytes / bytes_per_ns,
    )


def _simulated(device: str) -> StepTimeModel:
    name, _, speedup = device.partition("/x")
    try:
        known = profile(name).step_time
    except StartupError:
        known = PROFILES[DATACENTER_PROFILE].step_time
    try:
        factor = float(speedup or 1)
    except ValueError:
        return known
    return known.scaled(1 / factor) if SPEEDUPS[0] <= factor <= SPEEDUPS[1] else known
