"""Named device profiles: a step-time model, and the size of KV, for each device.

The profiles in this module are not measured. They are rooflines: FLOPs and bytes of the model's published shape over
the device's published peaks, at the efficiency stated in each entry. An H100 SXM has 989 TFLOP/s of dense bf16, 3.35
TB/s and 80 GB. Many more profiles are fitted to measurements and shipped as a file (`data/profiles.json`,
docs/profiles.md).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.perfmodel.utilisation import Compute, gpu_peaks
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel

SHIPPED_FILE: Final = Path(__file__).parent / "data" / "profiles.json"


@cache
def shipped_entries() -> Mapping[str, Mapping[str, Any]]:
    """Return the file's entries by name.

    Each entry has `step_time`, `gpus`, `kv_bytes_per_token`, `kv_memory_bytes`, `device` and `source`.
    """
    found = json.loads(SHIPPED_FILE.read_text())["profiles"]
    return MappingProxyType({entry["name"]: entry for entry in found})


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of one model on one kind of worker."""

    name: str
    step_time: StepTimeModel
    kv_bytes_per_token: int
    kv_memory_bytes: int
    """The memory for KV that weights and activations leave."""
    gpus: int


_LLAMA_8B_H100 = Profile(
    name="llama-8b-h100",
    step_time=StepTimeModel(
        prefill_fixed_ns=5e6,  # launches of 32 layers and sampling
        prefill_token_ns=27_000,  # 16.1 GFLOP a token at 60 % of peak
        prefill_token_squared_ns=0.66,  # causal attention, 0.26 MFLOP a pair of tokens, at 40 % of peak
        decode_fixed_ns=7e6,  # 16.1 GB of weights at 75 % of bandwidth, and 0.6 ms of launches
        decode_sequence_ns=20_000,
        decode_kv_token_ns=52,  # 128 KiB at 75 % of bandwidth
        interference=0.3,  # between the extremes of a cluster design: 0 overlaps, 1 adds
    ),
    kv_bytes_per_token=131_072,  # 32 layers x 2 x 8 heads x 128 x 2 bytes
    kv_memory_bytes=54_000_000_000,
    gpus=1,
)

_LLAMA_70B_TP4_H100 = Profile(
    name="llama-70b-tp4-h100",
    step_time=StepTimeModel(
        prefill_fixed_ns=8e6,
        prefill_token_ns=71_000,  # 141 GFLOP a token at 50 % of four peaks
        prefill_token_squared_ns=0.95,  # 1.31 MFLOP a pair of tokens at 35 % of four peaks
        decode_fixed_ns=17.5e6,  # 141 GB at 70 % of four bandwidths, and 160 all-reduces of 15 us
        decode_sequence_ns=25_000,
        decode_kv_token_ns=35,  # 320 KiB at 70 % of four bandwidths
        interference=0.3,
    ),
    kv_bytes_per_token=327_680,  # 80 layers x 2 x 8 heads x 128 x 2 bytes
    kv_memory_bytes=139_000_000_000,
    gpus=4,
)

_SMOLLM2_135M_CPU = Profile(
    name="smollm2-135m-cpu",
    step_time=StepTimeModel(
        prefill_fixed_ns=30e6,
        prefill_token_ns=2_700_000,  # 0.27 GFLOP a token at 100 GFLOP/s, two cores with AVX
        prefill_token_squared_ns=350,  # 35 kFLOP a pair of tokens at the same speed
        decode_fixed_ns=45e6,  # 0.54 GB of float32 weights at 12 GB/s
        decode_sequence_ns=2_700_000,
        decode_kv_token_ns=3_800,  # 45 KiB at 12 GB/s
        interference=0.7,
    ),
    kv_bytes_per_token=46_080,  # 30 layers x 2 x 3 heads x 64 x 4 bytes
    kv_memory_bytes=512 * 1024 * 1024,
    gpus=1,
)

_INSTANT = Profile(
    name="instant",  # a device without any cost, so that only the suite's own cost remains
    step_time=StepTimeModel(
        prefill_fixed_ns=0,
        prefill_token_ns=0,
        prefill_token_squared_ns=0,
        decode_fixed_ns=0,
        decode_sequence_ns=0,
        decode_kv_token_ns=0,
        interference=0,
    ),
    kv_bytes_per_token=1_024,
    kv_memory_bytes=1_000_000_000,
    gpus=1,
)

PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {entry.name: entry for entry in (_LLAMA_8B_H100, _LLAMA_70B_TP4_H100, _SMOLLM2_135M_CPU, _INSTANT)}
)


def profile(name: str) -> Profile:
    """Return the profile with this name, from this module or the file. Raise StartupError that lists similar names."""
    found = PROFILES.get(name)
    if found is not None:
        return found
    entry = shipped_entries().get(name)
    if entry is None:
        near = get_close_matches(name, [*PROFILES, *shipped_entries()], n=6, cutoff=0.4)
        raise StartupError(
            f"step-time profile {name!r} is not known; nearest: {', '.join(near) or 'none'}; there are also "
            f"{', '.join(PROFILES)} and those of docs/profiles.md"
        )
    return Profile(
        name=name,
        step_time=StepTimeModel(**entry["step_time"]),
        kv_bytes_per_token=entry["kv_bytes_per_token"],
        kv_memory_bytes=entry["kv_memory_bytes"],
        gpus=entry["gpus"],
    )


DATACENTER_PROFILE: Final = "llama-8b-h100"
LAPTOP_PROFILE: Final = "smollm2-135m-cpu"
# The fractions of a GPU's peaks that steps reach, as in DATACENTER_PROFILE. GPUs that share a model reach `_TOGETHER`
# of these, which is the ratio of llama-70b-tp4-h100 to a single GPU.
MULTIPLYING, ATTENTION, READING = 0.6, 0.4, 0.75
_TOGETHER: Final = 0.9
DECODE_LAUNCHES_NS: Final = 0.6e6
# The range of speed-ups in a simulated device's name. Others are ignored.
SPEEDUPS: Final = (1e-6, 1e9)


@dataclass(frozen=True, slots=True)
class _MeasuredModel:
    """The model and engine of a shipped profile that was measured up to large batches."""

    profile: str
    gpu: str
    uncompiled: bool
    """True if vLLM ran without its compiler."""
    layer_parameters: int
    head_parameters: int
    attention_width: int
    kv_token_bytes: int
    parameter_bytes: int = 2

    def compute(self) -> Compute:
        flops_per_s, bytes_per_s = gpu_peaks(self.gpu)
        return Compute(
            layer_parameters=self.layer_parameters,
            head_parameters=self.head_parameters,
            parameter_bytes=self.parameter_bytes,
            attention_width=self.attention_width,
            kv_token_bytes=self.kv_token_bytes,
            peak_flops_per_s=flops_per_s,
            peak_bytes_per_s=bytes_per_s,
        )


# The parts of a vLLM worker's variant that mark an engine without CUDA graphs, and one without vLLM's compiler.
VARIANT_EAGER: Final = "eager"
VARIANT_UNCOMPILED: Final = "uncompiled"
# A model resembles a measured one if each of its sizes is within this factor of the measured one's.
LIKE: Final = 1.25
_LLAMA_31_8B: Final = (6_979_321_856, 525_336_576, 131_072, 131_072)
_MEASURED: Final = (
    _MeasuredModel("llama3.1-8b-h200-aic", "H200", False, *_LLAMA_31_8B),
    _MeasuredModel("llama3.1-8b-h200-aic-eager", "H200", True, *_LLAMA_31_8B),
)


def prior_step_time(
    engine: str, device: str = "", compute: Compute | None = None, gpus: int = 1, *, variant: str = ""
) -> StepTimeModel:
    """Return the assumed step times of a worker that has not run a step.

    They come from a shipped profile of this engine, GPU and a similar model, scaled to the model's shape. Without such
    a profile, they are a roofline of the model on `gpus` GPUs with known peaks, and else the nearest profile.

    Devices are "cpu", "cuda:NVIDIA H200", "sim:llama-8b-h100", "sim:llama-8b-h100/x50" (50 times as fast), or any other
    text for an unknown device.
    """
    if engine == "sim":
        return _simulated(device.removeprefix("sim:"))
    if device.startswith("cuda") and compute and compute.peak_flops_per_s > 0 and compute.peak_bytes_per_s > 0:
        measured = _measured(compute, variant) if engine == "vllm" and gpus == 1 else None
        return measured or _roofline(compute, gpus)
    on_gpu = device.startswith("cuda") or (not device and engine != "torch")
    return PROFILES[DATACENTER_PROFILE if on_gpu else LAPTOP_PROFILE].step_time


def prior_speed(
    engine: str, device: str, chunk_tokens: int, compute: Compute | None = None, gpus: int = 1, *, variant: str = ""
) -> Speed:
    """Return the assumed speed of a worker that has not reported one."""
    return Speed(prior_step_time(engine, device, compute, gpus, variant=variant), max(chunk_tokens, 1))


def _measured(compute: Compute, variant: str) -> StepTimeModel | None:
    """Return the shipped profile of a similar model, scaled to this model's shape; None if there is none."""
    parts = variant.split(", ")
    if VARIANT_EAGER in parts:
        return None
    for measured in _MEASURED:
        known = measured.compute()
        if measured.uncompiled == (VARIANT_UNCOMPILED in parts) and _is_like(compute, known):
            stated = profile(measured.profile).step_time
            scaled = _rescaled(stated, compute, known)
            # Without the compiler, the floor is the host's time to launch kernels, which the weights do not change.
            return replace(scaled, prefill_floor_ns=stated.prefill_floor_ns) if measured.uncompiled else scaled
    return None


def _is_like(one: Compute, known: Compute) -> bool:
    sizes = (
        (one.layer_parameters, known.layer_parameters),
        (one.weight_bytes, known.weight_bytes),
        (one.attention_width, known.attention_width),
        (one.kv_token_bytes, known.kv_token_bytes),
    )
    peaks, known_peaks = ((each.peak_flops_per_s, each.peak_bytes_per_s, each.parameter_bytes) for each in (one, known))
    plain = not one.kv_window_token_bytes and not one.kv_state_bytes
    return plain and peaks == known_peaks and all(wanted / LIKE <= size <= wanted * LIKE for size, wanted in sizes)


def _rescaled(stated: StepTimeModel, compute: Compute, known: Compute) -> StepTimeModel:
    """Scale the times in `stated`, a profile of the model `known`, that follow from FLOPs or bytes to another model."""
    parameters = compute.layer_parameters / known.layer_parameters
    weights = compute.weight_bytes / known.weight_bytes
    return replace(
        stated,
        prefill_floor_ns=stated.prefill_floor_ns * weights,
        prefill_token_ns=stated.prefill_token_ns * parameters,
        prefill_token_squared_ns=stated.prefill_token_squared_ns * compute.attention_width / known.attention_width,
        decode_fixed_ns=stated.decode_fixed_ns * weights,
        decode_kv_token_ns=stated.decode_kv_token_ns * compute.kv_token_bytes / known.kv_token_bytes,
        decode_wide_ns=stated.decode_wide_ns * parameters,
    )


def _roofline(compute: Compute, gpus: int) -> StepTimeModel:
    """Return a roofline model. The costs that do not follow from FLOPs or bytes are those of DATACENTER_PROFILE."""
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
