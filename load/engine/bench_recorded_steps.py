"""Compare recorded steps of vLLM on a GPU, timed by CUDA events, with the times and phases that a worker learns.

The bench reads the recordings in FULCRUM_DATA/vllm_h200, and gives each step to the learner that workers run. The
learner starts as on a worker with this GPU (`--start live`), from a roofline of the model, or from a named profile.
With `--held-out` it learns from even seconds, and the tables are of odd ones. The bench prints a table for each
recording, then one JSON line.

Two values are approximate. The contexts of decodes come from vLLM's KV metrics of the same time, and all prompts of a
step have the same length. A step ends at its CUDA event, when a worker would see its output arrive.
"""

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from libs.perfmodel.learner import StepTimeLearner
from libs.perfmodel.profiles import VARIANT_UNCOMPILED, prior_step_time, profile
from libs.perfmodel.utilisation import Compute, gpu_peaks
from libs.policy.step_time import StepTimeModel, StepWork, split_step_ns
from load.measure import bench_parser, show, titled_table

RECORDINGS: Final = {"default": "", "eager": VARIANT_UNCOMPILED, "prefill_role": VARIANT_UNCOMPILED}
"""The part of the worker's variant on which a recording's first model depends."""
GPU: Final = "NVIDIA H200"
LIVE, ROOFLINE = "live", "roofline"
LLAMA_31_8B: Final = Compute(6_979_321_856, 525_336_576, 2, 131_072, 131_072, *gpu_peaks(GPU))
# The tokens that fit the KV pool. Answers of known lengths filled known shares of it in the phases `balanced` and
# `decode_heavy`, which give 880,000 and 887,000.
KV_TOKENS: Final = 885_000
HALF_BLOCK_TOKENS: Final = 8
"""The mean number of unused tokens in the last block of a sequence."""
CONTEXT_TOKENS: Final = 600
"""The assumed context of a sequence if the metrics do not show it."""
REFIT_S: Final = 2.0
BATCHES: Final = (512, 256)
"""Larger batches than these have their own rows in the tables. vLLM captures graphs of up to 512 sequences."""
SMALL_CHUNK: Final = 256
WARM_UP_S: Final = 5.0
"""Longer steps compile kernels, and are not learned."""


def steps_of(folder: Path, name: str) -> Iterator[tuple[float, float, StepWork]]:
    """Yield (start, end, work) of each step. Times are Unix seconds."""
    times_s, contexts = contexts_of(folder, name)
    with gzip.open(folder / f"{name}.steps.gz", "rt") as lines:
        base_s, ended_s = json.loads(next(lines))["base_wall_s"], 0.0
        for line in lines:
            step = json.loads(line)
            start_s, end_s = max(step["w"], ended_s), base_s + step["t1_ms"] / 1e3
            ended_s = max(end_s, ended_s)
            tokens, prompts, decodes = step["pt"], step["pr"], step["dr"]
            squared = prompts * (tokens // max(prompts, 1)) ** 2
            if end_s > start_s:
                context = float(np.interp(start_s, times_s, contexts)) if contexts else CONTEXT_TOKENS
                yield start_s, end_s, StepWork(tokens, prompts, tokens, decodes, round(decodes * context), squared)


def contexts_of(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Return (Unix seconds, mean context of running sequences) from vLLM's metrics, which were read twice a second."""
    times_s, contexts = [], []
    with gzip.open(folder / f"{name}.scrapes.jsonl.gz", "rt") as lines:
        for line in lines:
            scrape = json.loads(line)
            values = {row.partition("{")[0]: float(row.rpartition(" ")[2]) for row in scrape.get("m", ())}
            running = values.get("vllm:num_requests_running", 0.0)
            if running:
                tokens = values["vllm:kv_cache_usage_perc"] * KV_TOKENS / running - HALF_BLOCK_TOKENS
                times_s.append(scrape["t"])
                contexts.append(max(tokens, 1.0))
    return times_s, contexts


def kind_of(work: StepWork) -> str:
    if not work.decode_sequences:
        return "prefill"
    batch = next((f", batch over {size}" for size in BATCHES if work.decode_sequences > size), "")
    if not work.prefill_tokens:
        return f"decode{batch}"
    return f"mixed, chunk {'up to' if work.prefill_tokens <= SMALL_CHUNK else 'over'} {SMALL_CHUNK}{batch}"


def start_of(start: str, variant: str) -> StepTimeModel:
    if start not in (LIVE, ROOFLINE):
        return profile(start).step_time
    return prior_step_time("vllm" if start == LIVE else "torch", f"cuda:{GPU}", LLAMA_31_8B, variant=variant)


def measure(folder: Path, name: str, start: str, *, held_out: bool) -> dict[str, Any]:
    phases = json.loads((folder / f"{name}.truth.json").read_text())["phases"]
    learner, refit_s = StepTimeLearner(start_of(start, RECORDINGS[name])), 0.0
    first = learner.model
    busy_ns: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for start_s, end_s, work in steps_of(folder, name):
        duration_ns = round((end_s - start_s) * 1e9)
        if duration_ns > WARM_UP_S * 1e9:
            continue
        phase = next((each["phase"] for each in phases if each["from_s"] <= start_s < each["to_s"]), None)
        odd = int(start_s) % 2 == 1
        if phase is not None and (odd or not held_out):
            for index, part_ns in enumerate(split_step_ns(learner.model, work, duration_ns)):
                busy_ns[phase][index] += part_ns
            ratios[kind_of(work)].append((learner.model.step_ns(work) / duration_ns, first.step_ns(work) / duration_ns))
        if not (odd and held_out):
            learner.add(work, duration_ns)
        if end_s >= refit_s:
            learner.refit()
            refit_s = end_s + REFIT_S
    return {
        "phases": {} if held_out else {each["phase"]: _phase(each, *busy_ns[each["phase"]]) for each in phases},
        "predicted_over_measured": {kind: _ratios(found) for kind, found in sorted(ratios.items())},
    }


def _phase(truth: Mapping[str, Any], prefill_ns: int, decode_ns: int) -> dict[str, float | None]:
    busy_ns = prefill_ns + decode_ns
    return {
        "busy": round(busy_ns / 1e9 / (truth["to_s"] - truth["from_s"]), 4),
        "busy_truth": truth["busy_share"],
        "prefill": round(prefill_ns / busy_ns, 4) if busy_ns else None,
        "prefill_truth": truth["prefill_share_of_busy"],
    }


def _ratios(found: list[tuple[float, float]]) -> dict[str, float | list[float]]:
    learned, first = np.quantile(np.array(found), [0.1, 0.5, 0.9], axis=0).T.round(3).tolist()
    return {"steps": len(found), "learned_p10_p50_p90": learned, "start_p10_p50_p90": first}


def print_tables(name: str, found: Mapping[str, Any]) -> None:
    phases = titled_table(
        f"{name}: shares by phase of load", "phase", "busy", "by events", "prefill of it", "by events"
    )
    for phase, row in found["phases"].items():
        phases.add_row(phase, *("" if value is None else f"{value:.3f}" for value in row.values()))
    times = titled_table(
        f"{name}: predicted over measured step time", "step", "steps", "learned p10, p50, p90", "its start alone"
    )
    for kind, row in found["predicted_over_measured"].items():
        learned, first = (", ".join(f"{each:.2f}" for each in row[key]) for key in list(row)[1:])
        times.add_row(kind, str(row["steps"]), learned, first)
    show(*[phases] * bool(found["phases"]), times)


def main() -> None:
    options = bench_parser(
        __doc__,
        start=("llama3.1-8b-h200-aic", f"{LIVE}, {ROOFLINE}, or a shipped profile"),
        held_out=(False, "learn from even seconds, report odd ones"),
    ).parse_args()
    folder = Path(os.environ.get("FULCRUM_DATA", "")) / "vllm_h200"
    if not folder.is_dir():
        raise SystemExit("FULCRUM_DATA has to name the folder with the recordings, see docs/data.md")
    found = {name: measure(folder, name, options.start, held_out=options.held_out) for name in RECORDINGS}
    for name, each in found.items():
        print_tables(name, each)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
