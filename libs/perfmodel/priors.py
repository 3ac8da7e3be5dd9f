"""Assumed step times of a worker that has not run a step yet. Pure."""

from dataclasses import replace
from typing import Final

from libs.contracts.errors import StartupError
from libs.perfmodel.profiles import PROFILES, profile
from libs.perfmodel.utilisation import Compute
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel

DATACENTER_PROFILE: Final = "llama-8b-h100"
LAPTOP_PROFILE: Final = "smollm2-135m-cpu"
# Fractions of a GPU's peaks that steps reach, as in DATACENTER_PROFILE. GPUs that share a model reach `_TOGETHER`
# of them, which is the ratio between llama-70b-tp4-h100 and a single GPU.
MULTIPLYING, ATTENTION, READING = 0.6, 0.4, 0.75
_TOGETHER: Final = 0.9
DECODE_LAUNCHES_NS: Final = 0.6e6
# Range of speed-ups in a simulated device's name. Any other one is ignored.
SPEEDUPS: Final = (1e-6, 1e9)


def prior_step_time(engine: str, device: str = "", compute: Compute | None = None, gpus: int = 1) -> StepTimeModel:
    """Return a roofline of the model's shape on `gpus` GPUs if their peaks are known, else the nearest profile's
    model.

    Devices are "cpu", "cuda:NVIDIA H200", "sim:llama-8b-h100", "sim:llama-8b-h100/x50" (50 times as fast), or
    unknown.
    """
    if engine == "sim":
        return _simulated(device.removeprefix("sim:"))
    if device.startswith("cuda") and compute and compute.peak_flops_per_s > 0 and compute.peak_bytes_per_s > 0:
        return _roofline(compute, gpus)
    on_gpu = device.startswith("cuda") or (not device and engine != "torch")
    return PROFILES[DATACENTER_PROFILE if on_gpu else LAPTOP_PROFILE].step_time


def prior_speed(engine: str, device: str, chunk_tokens: int, compute: Compute | None = None, gpus: int = 1) -> Speed:
    """Return the assumed speed of a worker that has not reported one."""
    return Speed(prior_step_time(engine, device, compute, gpus), max(chunk_tokens, 1))


def _roofline(compute: Compute, gpus: int) -> StepTimeModel:
    """Return a roofline model. Costs that do not follow from FLOPs and bytes, mainly launches, are
    DATACENTER_PROFILE's.
    """
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
