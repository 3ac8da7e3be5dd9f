"""`python -m load.gpu.engine_steps --engine vllm`: measure an engine's steps on a GPU through its own reports.

The engine gets a model of Llama-8B's shape. It runs whole prompts of many sizes, decodes by batch and context, and
prompts that arrive during decodes. The result has the median of each kind of reported step, and the model that a worker
learns from all steps. It is printed as a table, then as one JSON object in the last line.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from libs.engine.config import EngineConfig
from libs.engine.local import make_engine
from libs.engine.port import Engine
from libs.engine.reports import EngineEvent
from libs.perfmodel.learner import StepKind, StepTimeLearner
from libs.perfmodel.profiles import prior_step_time
from libs.policy.step_time import StepWork
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EventReader
from libs.worker.telemetry import work_of
from load.engine.bench_phase import submit
from load.gpu.shapes import add_model_options, vllm_arguments, write_model
from load.measure import bench_parser
from load.setup import start_engine

PROMPTS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
DECODES: Final = ((1, 1024), (4, 1024), (16, 1024), (64, 1024), (128, 1024), (16, 4096), (32, 4096))
# (prompt tokens, sequences, context tokens of each)
MIXED: Final = ((512, 64, 1024), (2048, 64, 1024), (2048, 16, 4096))
OUTPUT_TOKENS: Final = 40
REPEATS: Final = 4
CHUNK_TOKENS: Final = 8192
KV_MB: Final = 24 << 10
VLLM_ARGUMENTS: Final = vllm_arguments(context_tokens=16_384, gpu_share=0.85, kv_mb=KV_MB)


@dataclass
class MeasuredEngine:
    """An engine under measurement, with the reader of its reports."""

    engine: Engine
    reader: EventReader
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    random: Any = field(default_factory=lambda: np.random.default_rng(3))

    def submit(self, prompt_tokens: int, output_tokens: int) -> int:
        """Submit a new prompt of random tokens, and return its id."""
        prompt = self.random.integers(100, 40_000, prompt_tokens, dtype=np.int32)
        return submit(self.engine, next(self.ids), prompt, output_tokens)

    async def drain(self, keys: list[int]) -> None:
        for key in keys:
            await self.reader.ended(key)


async def lead(led: MeasuredEngine) -> None:
    """Run all measured work: prompts `REPEATS` times, and decodes for `OUTPUT_TOKENS` steps."""
    for _ in range(REPEATS):
        for tokens in PROMPTS:
            await led.drain([led.submit(tokens, 1)])
    for batch, context in DECODES:
        await led.drain([led.submit(context, OUTPUT_TOKENS) for _ in range(batch)])
    for tokens, batch, context in MIXED:
        keys = [led.submit(context, 4 * OUTPUT_TOKENS) for _ in range(batch)]
        for key in keys:
            await led.reader.tokens(key, 2)
        for _ in range(REPEATS):
            await led.drain([led.submit(tokens, 1)])
        await led.drain(keys)


def medians(steps: list[tuple[StepWork, int]]) -> list[dict[str, Any]]:
    """Return the median time of each group of similar steps.

    The steps of a group have equal kinds, tokens, prompts and sequences. Their contexts round to the same multiple of
    512.
    """
    alike: defaultdict[tuple[str, int, int, int, int, int, int], list[int]] = defaultdict(list)
    for work, ns in steps:
        kv = round(work.decode_kv_tokens / max(work.decode_sequences, 1) / 512) * 512
        prompts = work.prefill_sequences, work.prefill_context_tokens, work.prefill_squared_tokens
        alike[StepKind.of(work).value, work.prefill_tokens, work.decode_sequences, kv, *prompts].append(ns)
    return [
        {
            "kind": k,
            "prompt": p,
            "batch": b,
            "context": c,
            "prompts": prompts,
            "prompt_context": reads,
            "prompt_squared": squared,
            "steps": len(ns),
            "ms": round(statistics.median(ns) / 1e6, 3),
        }
        for (k, p, b, c, prompts, reads, squared), ns in sorted(alike.items())
    ]


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = options.model or write_model(folder / options.shape, options.shape, options.device)
    config = EngineConfig(
        model, options.shape, device=options.device, kv_memory_mb=KV_MB, max_sequences=256,
        prefill_chunk_tokens=CHUNK_TOKENS, vllm_arguments=VLLM_ARGUMENTS | json.loads(options.vllm_arguments),
    )  # fmt: skip
    engine, began_s = make_engine(options.engine, config, SystemClock()), time.monotonic()
    await start_engine(engine)
    start_s, steps = time.monotonic() - began_s, list[tuple[StepWork, int]]()
    device, variant = engine.device, engine.capabilities.variant
    prior = prior_step_time(options.engine, device, engine.capabilities.compute, variant=variant)

    def keep(event: EngineEvent) -> None:
        if event.step is not None and event.step.end_unix_ns:
            steps.append((work_of(event.step), event.step.end_unix_ns - event.step.start_unix_ns))

    reader = EventReader(engine, keep)
    try:
        async with asyncio.timeout(options.limit_s):
            await lead(MeasuredEngine(engine, reader))
    except TimeoutError:
        print("out of time")
    finally:
        await reader.close()
        await engine.close()
    learner = StepTimeLearner(prior)
    for work, ns in steps:
        learner.add(work, ns)
    learner.refit()
    return {
        "engine": options.engine,
        "device": device,
        "variant": variant,
        "start_s": round(start_s, 1),
        "prior": asdict(prior),
        "learned": asdict(learner.model),
        "steps": medians(steps),
    }


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = asyncio.run(measure(options, Path(folder)))
    print(f"{'kind':<9}{'prompt':>7}{'batch':>7}{'context':>9}{'steps':>7}{'ms':>10}")
    for row in found["steps"]:
        print(
            f"{row['kind']:<9}{row['prompt']:>7}{row['batch']:>7}{row['context']:>9}{row['steps']:>7}{row['ms']:>10.3f}"
        )
    print(json.dumps(found))


def parser() -> argparse.ArgumentParser:
    further = "{}", "further ones of vLLM's engine, as JSON"
    made = bench_parser(__doc__, device="cuda:0", vllm_arguments=further, limit_s=120.0)
    add_model_options(made)
    return made


if __name__ == "__main__":
    main(parser().parse_args())
