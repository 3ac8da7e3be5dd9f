"""`python -m load.make_profiles`: fits the shipped device profiles to public timing data, and reports their errors.

Two sources, either of which may be missing (its profiles then stay as they are):
- `$FULCRUM_DATA/gpu_step_profiles.csv`: steps measured on real GPUs, derived from MachineLearningSystem/25SOSP-Aegaeon
  (Apache-2.0);
- the package aiconfigurator-core (Apache-2.0): kernels measured on real GPUs by NVIDIA, composed into steps by its own
  estimator. Install it beside this project only to run this script.
stdout: a table of errors on steps that no fit has seen, then one JSON object as the last line.
"""

import argparse
import csv
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from libs.perfmodel.fit import Rows, fit_steps, predict
from libs.perfmodel.learner import StepKind
from libs.perfmodel.profiles import PROFILES, SHIPPED_FILE
from libs.policy.step_time import StepTimeModel, StepWork, chunks_work

AIC_VERSION: Final = "0.12.0"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's published shape, in bfloat16 where nothing else is said."""

    name: str
    parameters_billion: float
    layers: int
    """Layers that keep the KV of the whole context."""
    kv_heads: int
    head_dim: int = 128
    weight_bytes_per_parameter: float = 2.0
    kv_item_bytes: int = 2
    latent_items: int = 0
    """Numbers that one layer keeps of a token in place of keys and values (MLA); 0 if it keeps those."""

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * (self.latent_items or 2 * self.kv_heads * self.head_dim) * self.kv_item_bytes

    @property
    def weight_bytes(self) -> float:
        return self.parameters_billion * 1e9 * self.weight_bytes_per_parameter


MODELS: Final = {
    "baichuan2_13b_chat": ModelFacts("baichuan2-13b", 13.9, 40, 40),
    "baichuan_7b": ModelFacts("baichuan-7b", 7.0, 32, 32),
    "internlm2_5_7b_chat": ModelFacts("internlm2.5-7b", 7.74, 32, 8),
    "llama2_13b_chat": ModelFacts("llama2-13b", 13.0, 40, 40),
    "llama2_7b": ModelFacts("llama2-7b", 6.74, 32, 32),
    "llava1_5_13b": ModelFacts("llava1.5-13b", 13.35, 40, 40),
    "qwen1_5_14b_chat": ModelFacts("qwen1.5-14b", 14.17, 40, 40),
    "qwen1_5_moe_a2_7b_chat": ModelFacts("qwen1.5-moe-a2.7b", 14.3, 24, 16),
    "qwen2_5_7b": ModelFacts("qwen2.5-7b", 7.62, 28, 4),
    "qwen_14b_chat": ModelFacts("qwen-14b-chat", 14.17, 40, 40),
    "qwen_7b": ModelFacts("qwen-7b", 7.72, 32, 32),
    "qwen_7b_chat": ModelFacts("qwen-7b-chat", 7.72, 32, 32),
    "yi1_5_6b_chat": ModelFacts("yi1.5-6b", 6.06, 32, 4),
    "yi1_5_9b_chat": ModelFacts("yi1.5-9b", 8.83, 48, 4),
    "meta-llama/Meta-Llama-3.1-8B": ModelFacts("llama3.1-8b", 8.03, 32, 8),
    "meta-llama/Meta-Llama-3.1-70B": ModelFacts("llama3.1-70b", 70.6, 80, 8),
    "Qwen/Qwen3-8B": ModelFacts("qwen3-8b", 8.19, 36, 8),
    "Qwen/Qwen3-32B": ModelFacts("qwen3-32b", 32.8, 64, 8),
}

GPU_MEMORY_GB: Final = {
    "A10": 24,
    "A100": 80,
    "H20": 96,
    "H100": 80,
    "H800": 80,
    "H200": 141,
    "B200": 180,
    "B300": 268,
    "GB200": 186,
    "L40S": 48,
    "RTX-PRO-6000": 96,
}

_SYSTEMS: Final = {
    "a100_sxm": "A100",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000",
}
# (model, aiconfigurator's name of the system, device)
AIC_PAIRS: Final = tuple(
    (model, system, device) for model in MODELS if "/" in model for system, device in _SYSTEMS.items()
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A model in the types and at the width in which people serve it, as aiconfigurator is asked for it."""

    model: str
    facts: ModelFacts
    system: str
    gpus: int
    options: Mapping[str, str | int]
    types: str
    least_tokens: int = 16
    """Least prompt tokens of a step that counts for the fit. Fewer read only some of a model's experts, and a line
    through both would miss the large steps that prefill runs.
    """

    @property
    def device(self) -> str:
        return _SYSTEMS[self.system]


# A half of gpt-oss's 36 layers keeps 128 tokens alone, which is left out. MXFP4 is 4.25 bits an expert's weight.
_GPT_OSS: Final = ModelFacts("gpt-oss-120b", 116.8, 18, 8, head_dim=64, weight_bytes_per_parameter=0.55)
# Llama 3.3 has its shape.
_LLAMA_70B: Final = "meta-llama/Meta-Llama-3.1-70B"
_LLAMA_FP8: Final = ModelFacts("llama3.3-70b-fp8", 70.6, 80, 8, weight_bytes_per_parameter=1.03, kv_item_bytes=1)
_LLAMA_NVFP4: Final = ModelFacts("llama3.3-70b-nvfp4", 70.6, 80, 8, weight_bytes_per_parameter=0.6, kv_item_bytes=1)
_LLAMA_BF16: Final = ModelFacts("llama3.3-70b", 70.6, 80, 8)
# 512 numbers of the latent and 64 of the rotated key; weights in FP8 blocks.
_DEEPSEEK: Final = ModelFacts("deepseek-v3", 671.0, 61, 1, weight_bytes_per_parameter=1.02, latent_items=576)
_FP8: Final = MappingProxyType({"gemm_quant_mode": "fp8", "kvcache_quant_mode": "fp8"})
_NVFP4: Final = MappingProxyType({"gemm_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"})


_MANY: Final = 512


def _experts(width: int) -> Mapping[str, int]:
    return {"moe_tp_size": width, "moe_ep_size": 1}


# By name of the step-time profile.
SETUPS: Final = {
    "gpt-oss-120b-h100-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "h100_sxm", 1, _experts(1), "MXFP4", _MANY),
    "gpt-oss-120b-h100-tp2-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "h100_sxm", 2, _experts(2), "MXFP4", _MANY),
    "gpt-oss-120b-h100-tp4-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "h100_sxm", 4, _experts(4), "MXFP4", _MANY),
    "gpt-oss-120b-b200-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "b200_sxm", 1, _experts(1), "MXFP4", _MANY),
    "llama3.3-70b-fp8-h100-tp2-aic": Setup(_LLAMA_70B, _LLAMA_FP8, "h100_sxm", 2, _FP8, "FP8, KV FP8"),
    "llama3.3-70b-fp8-h100-tp4-aic": Setup(_LLAMA_70B, _LLAMA_FP8, "h100_sxm", 4, _FP8, "FP8, KV FP8"),
    "llama3.3-70b-h100-tp4-aic": Setup(_LLAMA_70B, _LLAMA_BF16, "h100_sxm", 4, {}, "bfloat16"),
    "llama3.3-70b-h100-tp8-aic": Setup(_LLAMA_70B, _LLAMA_BF16, "h100_sxm", 8, {}, "bfloat16"),
    "llama3.3-70b-nvfp4-b200-aic": Setup(_LLAMA_70B, _LLAMA_NVFP4, "b200_sxm", 1, _NVFP4, "NVFP4, KV FP8"),
    "deepseek-v3-h200-tp8-aic": Setup(
        "deepseek-ai/DeepSeek-V3", _DEEPSEEK, "h200_sxm", 8, _experts(8), "FP8 blocks", _MANY
    ),
}


def gpu_count(facts: ModelFacts, device: str) -> int:
    """Return the smallest power of two that leaves at least 45 % of the memory to KV."""
    gpus = 1
    while facts.weight_bytes > 0.55 * GPU_MEMORY_GB[device] * 1e9 * gpus:
        gpus *= 2
    return gpus


# Most prompt tokens that the measured engine computed in a step: with more, a time is not one step's.
CSV_STEP_TOKENS = 4096
# Every fourth step is held out, for the error figures.
HELD_OUT = 4
# Where no mixed step was measured.
ASSUMED_INTERFERENCE = 0.3
PRIOR = PROFILES["llama-8b-h100"].step_time
Steps = list[tuple[StepWork, float]]


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    source: str
    engine: str
    device: str
    gpus: int
    kv_bytes_per_token: int
    kv_memory_bytes: int
    step_time: dict[str, float]
    mixed_measured: bool
    error: dict[str, tuple[float, float]]
    """By kind of step: median and 90th percentile of the relative error on held-out steps."""


def rows_of(steps: Steps) -> Rows:
    table = [
        (work.prefill_tokens, work.squared, work.decode_sequences, work.decode_kv_tokens, ns, 1.0) for work, ns in steps
    ]
    columns = np.array(table, dtype=np.float64).reshape(-1, 6)
    return Rows(*(columns[:, index] for index in range(6)))


def fit_entry(*, name: str, source: str, engine: str, device: str, facts: ModelFacts, gpus: int, steps: Steps) -> Entry:
    """Fit, judge on held-out steps, fit again on all."""
    held = np.arange(len(steps)) % HELD_OUT == HELD_OUT - 1
    rows = rows_of(steps)
    mixed_measured = any(StepKind.of(work) is StepKind.MIXED for work, _ in steps)
    trial, seen = fit_steps(PRIOR, rows.pick(~held)), rows.pick(held)
    relative = np.abs(predict(trial, seen) / seen.duration_ns - 1)
    kinds = np.array([StepKind.of(work).value for (work, _), out in zip(steps, held, strict=True) if out])
    error = {
        kind.value: (
            round(float(np.median(relative[kinds == kind.value])), 4),
            round(float(np.quantile(relative[kinds == kind.value], 0.9)), 4),
        )
        for kind in StepKind
        if (kinds == kind.value).any()
    }
    model: StepTimeModel = fit_steps(PRIOR, rows)
    times = {key: float(f"{value:.5g}") for key, value in asdict(model).items()}
    if not mixed_measured:
        times["interference"] = ASSUMED_INTERFERENCE
    memory = GPU_MEMORY_GB[device] * 1e9 * gpus * 0.9 - facts.weight_bytes - 2e9 * gpus
    return Entry(
        name, source, engine, device, gpus, facts.kv_bytes_per_token, max(int(memory), 10**9), times, mixed_measured,
        error,
    )  # fmt: skip


def from_csv(file: Path) -> Iterator[Entry]:
    """Yield a profile for each model and GPU of the measured steps."""
    found: dict[tuple[str, str], Steps] = defaultdict(list)
    with file.open() as lines:
        for row in csv.DictReader(lines):
            length, batch = int(row["input_tokens"]), int(row["batch_size"])
            if length * batch > CSV_STEP_TOKENS:
                continue
            steps = found[row["model"], row["gpu"]]
            steps.append((chunks_work([(0, length)] * batch), float(row["prefill_s"]) * 1e9))
            decode = StepWork(decode_sequences=batch, decode_kv_tokens=batch * length)
            steps.append((decode, float(row["decode_step_s"]) * 1e9))
    for (model, gpu), steps in sorted(found.items()):
        facts = MODELS[model]
        shuffled = [steps[index] for index in np.random.default_rng(0).permutation(len(steps))]
        name = f"{facts.name}-{gpu.lower()}"
        yield fit_entry(
            name=name, source="25SOSP-Aegaeon", engine="vllm", device=gpu, facts=facts, gpus=1, steps=shuffled
        )


def from_aiconfigurator() -> Iterator[Entry]:
    """Yield a profile for each pair that aiconfigurator's data covers, and for each setup."""
    wanted = {}
    for model, system, device in AIC_PAIRS:
        facts = MODELS[model]
        gpus = gpu_count(facts, device)
        name = f"{facts.name}-{device.lower()}" + (f"-tp{gpus}" if gpus > 1 else "") + "-aic"
        wanted[name] = Setup(model, facts, system, gpus, {}, "bfloat16")
    for name, setup in (wanted | SETUPS).items():
        try:
            steps = predicted_steps(setup)
        except Exception as error:  # its data may lack anything; the other profiles are still good
            print(f"left out: {name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        shuffled = [steps[index] for index in np.random.default_rng(0).permutation(len(steps))]
        yield fit_entry(
            name=name, source=f"aiconfigurator-core {AIC_VERSION}", engine="vllm", device=setup.device,
            facts=setup.facts, gpus=setup.gpus, steps=shuffled,
        )  # fmt: skip


def predicted_steps(setup: Setup) -> Steps:
    """Return steps of prefill, of decode and of both, as aiconfigurator predicts them. Its exceptions pass through."""
    from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found]  # noqa: PLC0415

    handle = EngineHandle.compile(setup.model, setup.system, "vllm", tp_size=setup.gpus, **setup.options)
    steps: Steps = []
    for start in (0, 1024, 4096, 16384):
        for tokens in (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192):
            if tokens < setup.least_tokens:
                continue
            ms = handle.predict_prefill_latency(1, start + tokens, start)
            steps.append((chunks_work([(start, start + tokens)]), ms * 1e6))
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for context in (128, 512, 1024, 2048, 4096, 8192):
            work = StepWork(decode_sequences=batch, decode_kv_tokens=batch * (context + 1))
            steps.append((work, handle.predict_decode_latency(batch, context) * 1e6))
    for batch in (1, 8, 32, 128):
        for context in (512, 2048, 8192):
            decode = StepWork(decode_sequences=batch, decode_kv_tokens=batch * (context + 1))
            for wanted in (64, 256, 512, 1024):
                if wanted < setup.least_tokens:
                    continue
                # Its chunk lies in the middle, on average, of a prompt as long as what a decode reads.
                tokens = min(wanted, context)
                start = (context - tokens) // 2
                ms = handle.mixed_step_latency(tokens, batch, context, 2)
                steps.append((chunks_work([(start, start + tokens)], decode), ms * 1e6))
    return steps


def main(options: argparse.Namespace) -> None:
    kept: dict[str, Any] = {}
    if SHIPPED_FILE.exists() and not options.anew:
        kept = {entry["name"]: entry for entry in json.loads(SHIPPED_FILE.read_text())["profiles"]}
    fresh: list[Entry] = []
    file = Path(os.environ.get("FULCRUM_DATA", "")) / "gpu_step_profiles.csv"
    if file.is_file():
        fresh += from_csv(file)
    else:
        print("FULCRUM_DATA has no gpu_step_profiles.csv: those profiles stay as they are", file=sys.stderr)
    if find_spec("aiconfigurator_core"):
        fresh += from_aiconfigurator()
    else:
        print("aiconfigurator-core is not installed: its profiles stay as they are", file=sys.stderr)
    print(f"{'profile':<34}{'prefill p50':>12}{'p90':>8}{'decode p50':>12}{'p90':>8}{'mixed p50':>11}{'p90':>8}")
    for entry in fresh:
        cells = [f"{value:.1%}" for kind in StepKind for value in entry.error.get(kind.value, ())] + ["–"] * 2
        print(f"{entry.name:<34}{cells[0]:>12}{cells[1]:>8}{cells[2]:>12}{cells[3]:>8}{cells[4]:>11}{cells[5]:>8}")
    profiles = sorted((kept | {entry.name: asdict(entry) for entry in fresh}).values(), key=lambda entry: entry["name"])
    head = {
        "made_by": "python -m load.make_profiles",
        "licence": "Apache-2.0, as both sources; see docs/profiles.md",
    }
    lines = ",\n".join(json.dumps(entry) for entry in profiles)
    SHIPPED_FILE.write_text(json.dumps(head)[:-1] + ', "profiles": [\n' + lines + "\n]}\n")
    medians = {
        kind.value: round(float(np.median([e.error[kind.value][0] for e in fresh if kind.value in e.error])), 4)
        for kind in StepKind
        if any(kind.value in e.error for e in fresh)
    }
    print(json.dumps({"profiles": len(profiles), "fresh": len(fresh), "median_of_median_errors": medians}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--anew", action="store_true", help="drop profiles whose source is missing")
    main(parser.parse_args())
