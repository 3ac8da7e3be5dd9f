"""Compare steps measured on a GPU with the predictions of its shipped profile.

`python -m load.gpu.against_profile FILE.json` compares figures that `load.gpu.bench_gpu` has written.
"""

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import InvalidRequest
from libs.lab.hardware import resolve
from libs.perfmodel.profiles import Profile
from libs.policy.step_time import StepWork

# The model whose shape was measured.
MODEL: Final = "llama3.1-8b"
# The parts of `bench_gpu` whose figures are steps of that shape.
MEASURED: Final = ("plain_steps", "engine_steps", "vllm_steps")


def profile_of(gpu: str) -> Profile | None:
    """Return the shipped profile for a GPU's name such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    for word in re.findall(r"[A-Z]+\d+[A-Z]*", gpu.upper()):
        try:
            return resolve(MODEL, word).profile
        except InvalidRequest:
            continue
    return None


def against_profile(gpu: str, figures: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return a row for each step: its measured and predicted ms, and their ratio."""
    profile = profile_of(gpu)
    if profile is None:
        return []
    rows = []
    for part in MEASURED:
        for step in _steps(figures.get(part)):
            work = _work(step)
            predicted_ms = profile.step_time.step_ns(work) / 1e6
            rows.append(
                {
                    "part": part, "profile": profile.name, "prompt": step["prompt"], "batch": step["batch"],
                    "context": step["context"], "ms": step["ms"], "predicted_ms": round(predicted_ms, 3),
                    "ratio": round(step["ms"] / predicted_ms, 3),
                }
            )  # fmt: skip
    return rows


def _steps(figures: object) -> list[dict[str, Any]]:
    """Return a part's rows, which are cells of plain steps or an engine's medians, without those that have no time."""
    if not isinstance(figures, dict):
        return []
    return [each for each in figures.get("cells") or figures.get("steps") or () if each.get("ms")]


def _work(step: Mapping[str, Any]) -> StepWork:
    """Return the work of a row: its prompts, and `batch` decodes of `context` tokens each.

    A row without a number of prompts has one whole prompt.
    """
    prompt = step["prompt"]
    return StepWork(
        prefill_tokens=prompt,
        prefill_sequences=step.get("prompts", 1 if prompt else 0),
        prefill_context_tokens=step.get("prompt_context", prompt),
        decode_sequences=step["batch"],
        decode_kv_tokens=step["batch"] * step["context"],
        prefill_squared_tokens=step.get("prompt_squared", prompt * prompt),
    )


def kind_of(row: Mapping[str, Any]) -> str:
    return ("mixed" if row["batch"] else "prefill") if row["prompt"] else "decode"


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each part and kind of step: the number of steps, and the ratio of measured to predicted time."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["part"], kind_of(row)), []).append(row["ratio"])
    for (part, kind), ratios in groups.items():
        ordered = sorted(ratios)
        print(
            f"{part:<14}{kind:<8}{len(ordered):>4} steps took {statistics.median(ordered):.2f} of what "
            f"{rows[0]['profile']} predicts ({ordered[0]:.2f} to {ordered[-1]:.2f})"
        )


def main(file: Path) -> None:
    kept = json.loads(file.read_text())
    figures = {each["name"]: each["figures"] for each in kept["parts"]} if "parts" in kept else kept
    gpu = kept.get("gpu") or next(each["gpu"] for each in figures.values() if isinstance(each, dict) and "gpu" in each)
    rows = against_profile(gpu, figures)
    print_table(rows)
    print(json.dumps({"gpu": gpu, "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="figures in JSON, as load.gpu.bench_gpu writes them")
    main(parser.parse_args().file)
