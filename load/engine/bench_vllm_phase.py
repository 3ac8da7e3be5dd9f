"""`python -m load.engine.bench_vllm_phase`: compare the steps that vLLM's scheduler reports with its worker's calls.

An engine serves bench_phase's mixed load on a CPU. A clock in the process that computes measures each model call. The
reported busy time is compared with it, over the whole run and in windows of a second. The step-time model learns during
the run, and its predictions are compared with the steps. The same steps are then repeated, and compared with the
predictions and with one another. The result is printed as a table, then as one JSON object in the last line. The bench
needs vLLM's environment (`make setup-vllm`).
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from libs.engine.config import EngineConfig
from libs.engine.port import Engine
from libs.engine.reports import StepReport
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.perfmodel.learner import StepKind
from libs.policy.step_time import StepTimeModel
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EventReader
from libs.testing.engines.real_model import real_model_folder
from libs.worker.telemetry import work_of
from load.engine.bench_phase import SHAPES, WINDOW_NS, accounted, serve, submit
from load.measure import bench_parser

# The prompt lengths of the sequences that decode.
DECODING_TOKENS: Final = (24, 40, 56)
OUTPUT_TOKENS: Final = 12
# The lengths of the prompts that are computed beside them, one after the other.
BESIDE_TOKENS: Final = (16, 32, 48)
FIRST_KEY: Final = 1 << 20
ROUND_KEYS: Final = len(DECODING_TOKENS) + len(BESIDE_TOKENS)
# The number of equal steps from which their scatter is measured.
MIN_ALIKE: Final = 4


@dataclass(frozen=True, slots=True)
class Floor:
    """The median relative errors of steps of one kind."""

    steps: int
    model_error: float
    noise: float
    """The relative error of the median of equal steps, which no model of their work can improve on."""


async def repeat(engine: Engine, reader: EventReader, rounds: int) -> list[StepReport]:
    """Run `rounds` equal rounds, and return their steps."""
    seen_before = len(reader.events)
    for number in range(rounds):
        await _round(engine, reader, FIRST_KEY + number * ROUND_KEYS)
    return [event.step for event in reader.events[seen_before:] if event.step and event.step.end_unix_ns]


async def _round(engine: Engine, reader: EventReader, key: int) -> None:
    """Run several decodes, and prompts beside them one after the other."""
    decoding = [_submit(engine, key + number, tokens, OUTPUT_TOKENS) for number, tokens in enumerate(DECODING_TOKENS)]
    key += len(decoding)

    def have_decoded(least: int) -> bool:
        return all(_tokens(reader, each) >= least for each in decoding)

    for number, tokens in enumerate(BESIDE_TOKENS):
        least = 3 * (number + 1)
        await reader.until(lambda least=least: have_decoded(least))  # type: ignore[misc]
        await reader.ended(_submit(engine, key + number, tokens, 1))
    for each in decoding:
        await reader.ended(each)


def floors(steps: list[StepReport], model: StepTimeModel) -> dict[StepKind, Floor]:
    """Return the errors of steps that were repeated often enough, by kind."""
    alike = defaultdict(list)
    for step in steps:
        work = work_of(step)
        same = (work.prefill_tokens, work.prefill_sequences, work.prefill_context_tokens, work.decode_sequences)
        alike[same].append((work, step.end_unix_ns - step.start_unix_ns))
    errors, noises = defaultdict(list), defaultdict(list)
    for group in alike.values():
        if len(group) < MIN_ALIKE:
            continue
        usual_ns = statistics.median(duration_ns for _, duration_ns in group)
        for work, duration_ns in group:
            errors[StepKind.of(work)].append(abs(model.step_ns(work) / duration_ns - 1))
            noises[StepKind.of(work)].append(abs(usual_ns / duration_ns - 1))
    return {
        kind: Floor(len(found), statistics.median(found), statistics.median(noises[kind]))
        for kind, found in errors.items()
    }


def _submit(engine: Engine, key: int, tokens: int, output_tokens: int) -> int:
    return submit(engine, key, np.random.default_rng(key).integers(100, 200, tokens, dtype=np.int32), output_tokens)


def _tokens(reader: EventReader, key: int) -> int:
    log = reader.log(key)
    return OUTPUT_TOKENS if log.end else len(log.token_ids)


FILE_VARIABLE: Final = "FULCRUM_BENCH_CALLS"
Span = tuple[int, int]


def overlap_ns(spans: list[Span], low_ns: int, high_ns: int) -> int:
    """Return the nanoseconds of the spans inside [low, high)."""
    return sum(max(min(end, high_ns) - max(start, low_ns), 0) for start, end in spans)


def calls_in(file: Path) -> list[Span]:
    """Return (start, end) of each call in Unix nanoseconds."""
    data = memoryview(file.read_bytes()).cast("q")
    return list(zip(data[::2].tolist(), data[1::2].tolist(), strict=True))


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    file, clock, shape = folder / "calls", SystemClock(), SHAPES["torch"]
    os.environ[FILE_VARIABLE] = str(file)
    config = EngineConfig(
        real_model_folder(), "bench", threads=options.threads, block_size_tokens=32, kv_memory_mb=256,
        prefill_chunk_tokens=shape.chunk_tokens,
        vllm_arguments={"max_model_len": 1024, "worker_cls": "load.engine.clocked_vllm.ClockedWorker"},
    )  # fmt: skip
    engine = VllmEngine(config, clock, VllmCore())
    async with accounted(engine, clock) as (account, reader):
        start_ns = clock.now_ns()
        await serve(engine, reader, shape, options.seconds)
        end_ns = clock.now_ns()
        account.cut()
        reported = account.phases(start_ns, end_ns)
        steps = [(event.step.start_unix_ns, event.step.end_unix_ns) for event in reader.events if event.step]
        calls = calls_in(file)
        errors = []
        for low_ns in range(start_ns, end_ns - WINDOW_NS, WINDOW_NS):
            window = account.phases(low_ns, low_ns + WINDOW_NS)
            true_ns = overlap_ns(calls, low_ns, low_ns + WINDOW_NS)
            errors.append((window.prefill_ns + window.decode_ns - true_ns) / WINDOW_NS)
        fitted, model = account.fitted, account.model
        again = floors(await repeat(engine, reader, options.rounds), model)
    length_ns = end_ns - start_ns
    ended = [step for step in steps if step[1]]
    busy_reported = (reported.prefill_ns + reported.decode_ns) / length_ns
    busy_true = overlap_ns(calls, start_ns, end_ns) / length_ns
    return {
        "seconds": round(length_ns / 1e9, 1),
        "steps": len(ended),
        "announced": len(steps) - len(ended),
        "coverage": round(reported.covered_ns / length_ns, 4),
        "busy_reported": round(busy_reported, 5),
        "busy_true": round(busy_true, 5),
        "busy_error_points": round(100 * abs(busy_reported - busy_true), 3),
        "window_error_points_mean": round(100 * statistics.mean(map(abs, errors)), 3),
        "window_error_points_max": round(100 * max(map(abs, errors)), 3),
        "prefill_steps": fitted.prefill.steps,
        "prefill_model_error_p50": round(fitted.prefill.error_p50, 4),
        "decode_steps": fitted.decode.steps,
        "decode_model_error_p50": round(fitted.decode.error_p50, 4),
        "mixed_steps": fitted.mixed.steps,
        "mixed_model_error_p50": round(fitted.mixed.error_p50, 4),
        **{
            f"{kind.value}_again_{name}": figure
            for kind, floor in again.items()
            for name, figure in (
                ("steps", floor.steps),
                ("model_error_p50", round(floor.model_error, 4)),
                ("noise_p50", round(floor.noise, 4)),
            )
        },
    }


def main() -> None:
    rounds = 12, "of steps that are done over and over"
    parser = bench_parser(__doc__, seconds=(60.0, "of load"), rounds=rounds, threads=1)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-phase-") as folder:
        found = asyncio.run(measure(Path(folder), parser.parse_args()))
    for name, value in found.items():
        print(f"{name:<28}{value!s:>12}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
