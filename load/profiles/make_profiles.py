"""`python -m load.profiles.make_profiles`: the shipped device profiles from public timing data, and how well they fit.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from libs.perfmodel.fit import fit_steps, predict
from libs.perfmodel.learner import StepKind
from libs.perfmodel.profiles import PROFILES, SHIPPED_FILE
from libs.perfmodel.samples import Rows
from libs.policy.step_time import StepTimeModel, StepWork, chunks_work
from load.profiles.profile_sources import (
    AIC_PAIRS,
    AIC_VERSION,
    GPU_MEMORY_GB,
    MODELS,
    SETUPS,
    ModelFacts,
    Setup,
    gpu_count,
)

CSV_STEP_TOKENS = 4096
"""Most prompt tokens that the measured engine computed in a step: with more, a time is not one step's."""
HELD_OUT = 4
"""Every fourth step is held out, for the error figures."""
ASSUMED_INTERFERENCE = 0.3
"""Where no mixed step was measured."""
PRIOR = PROFILES["llama-8b-h100"].step_time
Steps = list[tuple[StepWork, float]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One shipped profile."""

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
    """As columns."""
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
    """A profile for each model and GPU of the measured steps."""
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
    """A profile for each pair that its data covers, and for each setup."""
    wanted = {}
    for model, system, device in AIC_PAIRS:
        facts = MODELS[model]
        gpus = gpu_count(facts, device)
        name = f"{facts.name}-{device.lower()}" + (f"-tp{gpus}" if gpus > 1 else "") + "-aic"
        wanted[name] = Setup(model, facts, system, gpus, {}, "bfloat16")
    for name, setup in (wanted | SETUPS).items():
        try:
            steps = predicted_steps(setup)
        except Exception as error:  # whatever its data lacks, the others are still good
            print(f"left out: {name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        shuffled = [steps[index] for index in np.random.default_rng(0).permutation(len(steps))]
        yield fit_entry(
            name=name, source=f"aiconfigurator-core {AIC_VERSION}", engine="vllm", device=setup.device,
            facts=setup.facts, gpus=setup.gpus, steps=shuffled,
        )  # fmt: skip


def predicted_steps(setup: Setup) -> Steps:
    """Of prefill, of decode and of both, as aiconfigurator has them; raises what it raises."""
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
    """Fit, print, write."""
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
        "made_by": "python -m load.profiles.make_profiles",
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
