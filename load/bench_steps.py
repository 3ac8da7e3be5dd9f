"""`python -m load.bench_steps`: how well the step-time model foretells steps of the torch engine that it has not seen.

Runs a grid of chunk x batch x context on the runner itself (pure prefill, pure decode, mixed), fits on three quarters
of the grid's cells, and reports relative errors on the other quarter; and how much of a prompt chunk's cost hides in a
decode step, from the same two parts run separately. Rounds take turns over the whole grid, so that a noisy moment does
not fall on one cell. stdout: tables, then one JSON object as the last line; stderr: progress.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libs.engine.batching import work_of
from libs.engine.config import EngineConfig
from libs.engine.port import Capabilities, EngineIdentity, SamplingParams
from libs.engine.runner import Batch, Chunk, Runner
from libs.engine.torch.runner import TorchRunner
from libs.perfmodel import StepKind, StepTimeLearner, StepTimeModel, StepWork, prior_step_time
from libs.testing.real_model import real_model_folder

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
HELD_OUT = 4
"""Every so-manyth cell of a kind, in random order, is for judging only."""
CHUNKS = ((32, 0), (64, 0), (64, 512), (128, 0), (128, 1024), (256, 0), (256, 512), (512, 0), (512, 1024))
"""(prompt tokens, tokens before them that have KV)."""
DECODES = ((1, 128), (1, 1024), (2, 512), (4, 128), (4, 1024), (8, 256), (8, 768), (12, 512), (16, 128), (16, 768))
"""(sequences, tokens that each reads)."""
MIXED_CHUNKS = ((32, 0), (64, 512), (128, 0), (256, 0))
MIXED_DECODES = ((1, 1024), (4, 128), (4, 1024), (8, 256), (16, 768))


@dataclass(frozen=True)
class Cell:
    """One step of the grid: a prompt chunk, decodes, or both."""

    chunk: tuple[int, int] | None
    decode: tuple[int, int] | None

    @property
    def kind(self) -> StepKind:
        """What the step does."""
        if self.decode is None:
            return StepKind.PREFILL
        return StepKind.MIXED if self.chunk else StepKind.DECODE


Times = dict[Cell, list[int]]
"""Nanoseconds of each cell, one a round."""
Works = dict[Cell, StepWork]


def grid() -> list[Cell]:
    """Every cell; the parts of the mixed ones are among the pure ones."""
    return [
        *(Cell(chunk, None) for chunk in CHUNKS),
        *(Cell(None, decode) for decode in DECODES),
        *(Cell(chunk, decode) for chunk, decode in itertools.product(MIXED_CHUNKS, MIXED_DECODES)),
    ]


def batch_of(cell: Cell, capabilities: Capabilities) -> Batch:
    """The cell as work for a runner, on blocks of its own."""
    size, free, keys = capabilities.block_size_tokens, itertools.count(), itertools.count(1)
    random = np.random.default_rng(3)

    def chunk(start: int, tokens: int, prompt_tokens: int) -> Chunk:
        history = random.integers(100, 40_000, start + tokens, dtype=np.int32)
        table = np.fromiter(itertools.islice(free, -(-len(history) // size)), np.int32)
        return Chunk(next(keys), history[start:], start, table, True, GREEDY, history, prompt_tokens)

    chunks = []
    if cell.decode:
        sequences, context = cell.decode
        chunks += [chunk(context - 1, 1, context - 1) for _ in range(sequences)]
    if cell.chunk:
        tokens, start = cell.chunk
        chunks.append(chunk(start, tokens, start + tokens))
    return Batch(tuple(chunks))


async def measure(runner: Runner, capabilities: Capabilities, options: argparse.Namespace) -> Times:
    """Nanoseconds of every cell in every round, the order shuffled anew each time; the first round is not counted."""
    cells, random = grid(), np.random.default_rng(5)
    batches = {cell: batch_of(cell, capabilities) for cell in cells}
    found: defaultdict[Cell, list[int]] = defaultdict(list)
    end_s = time.monotonic() + options.limit_s
    for turn in range(options.rounds + 1):
        for index in random.permutation(len(cells)):
            if turn == 0 and index % 5:
                continue  # to warm up, every fifth will do
            if time.monotonic() > end_s and turn > 1:
                print("out of time", file=sys.stderr)
                return dict(found)
            start_ns = time.perf_counter_ns()
            await runner.run(batches[cells[index]])
            if turn:
                found[cells[index]].append(time.perf_counter_ns() - start_ns)
        print(f"round {turn} of {options.rounds}", file=sys.stderr)
    return dict(found)


def split(cells: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    """(to fit on, to judge by), the same share of each kind."""
    random = np.random.default_rng(11)
    fit, held = [], []
    for kind in StepKind:
        mine = [cell for cell in cells if cell.kind is kind]
        for place, index in enumerate(random.permutation(len(mine))):
            (held if place % HELD_OUT == HELD_OUT - 1 else fit).append(mine[index])
    return fit, held


def errors(model: StepTimeModel, times: Times, cells: list[Cell], works: Works) -> list[float]:
    """Relative errors of single steps."""
    return [abs(model.step_ns(works[cell]) / duration - 1) for cell in cells for duration in times[cell]]


def ride_along(times: Times) -> dict[int, float]:
    """By chunk size, the share of the chunk's own cost that the mixed step does not show: median over decodes."""
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for cell, durations in times.items():
        if cell.kind is not StepKind.MIXED or cell.chunk is None:
            continue
        alone = statistics.median(times[Cell(cell.chunk, None)])
        decode = statistics.median(times[Cell(None, cell.decode)])
        shares[cell.chunk[0]].append((alone + decode - statistics.median(durations)) / alone)
    return {tokens: statistics.median(found) for tokens, found in sorted(shares.items())}


def draw(file: Path, model: StepTimeModel, times: Times, held: list[Cell], works: Works) -> None:
    """Predicted against measured step times, those not seen by the fit filled."""
    import matplotlib as mpl  # noqa: PLC0415 (only where a picture is asked for)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(6, 5.4), layout="constrained")
    colours = {StepKind.PREFILL: "tab:cyan", StepKind.DECODE: "tab:green", StepKind.MIXED: "tab:orange"}
    for kind, colour in colours.items():
        for seen in (True, False):
            cells = [cell for cell in times if cell.kind is kind and (cell not in held) is seen]
            x = [statistics.median(times[cell]) / 1e6 for cell in cells]
            y = [model.step_ns(works[cell]) / 1e6 for cell in cells]
            face = "none" if seen else colour
            label = f"{kind.value}, {'fitted' if seen else 'held out'}"
            axes.scatter(x, y, s=34, facecolors=face, edgecolors=colour, label=label)
    axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="model, ms")
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def report(times: Times, works: Works, device: str, options: argparse.Namespace) -> None:
    """Fit, judge, print."""
    fit, held = split(list(times))
    learner = StepTimeLearner(prior_step_time("torch", device))
    for turn in range(options.rounds):
        for cell in fit:
            if turn < len(times[cell]):
                learner.add(works[cell], times[cell][turn])
    learner.refit()
    model = learner.model
    print(f"{'steps held out':<16}{'cells':>7}{'steps':>7}{'p50':>8}{'p90':>8}{'scatter p50':>13}")
    table = {}
    for kind in StepKind:
        mine = [cell for cell in held if cell.kind is kind]
        found = errors(model, times, mine, works)
        scatter = [abs(d / statistics.median(times[cell]) - 1) for cell in mine for d in times[cell]]
        p50, p90 = (float(value) for value in np.quantile(found, [0.5, 0.9]))
        table[kind.value] = {"steps": len(found), "error_p50": round(p50, 4), "error_p90": round(p90, 4)}
        print(f"{kind.value:<16}{len(mine):>7}{len(found):>7}{p50:>8.1%}{p90:>8.1%}{statistics.median(scatter):>13.1%}")
    shares = ride_along(times)
    print("\nshare of a prompt chunk's own cost that hides in a decode step, by its tokens:")
    print("  ".join(f"{tokens}: {share:.0%}" for tokens, share in shares.items()))
    print(f"interference {model.interference:.2f}; a decode step's fixed part {model.decode_fixed_ns / 1e6:.1f} ms")
    if options.picture:
        draw(options.picture, model, times, held, works)
        print(f"picture: {options.picture}")
    coefficients = {name: round(getattr(model, name), 4) for name in StepTimeModel.__dataclass_fields__}
    print(
        json.dumps(
            {
                "device": device,
                "threads": options.threads,
                "rounds": min(map(len, times.values())),
                "held_out": table,
                "ride_along_share": {str(tokens): round(share, 4) for tokens, share in shares.items()},
                "model": coefficients,
                "cells": [
                    {"chunk": cell.chunk, "decode": cell.decode, "ms": [round(ns / 1e6, 2) for ns in durations]}
                    for cell, durations in times.items()
                ],
            }
        )
    )


async def main(options: argparse.Namespace) -> None:
    """Load, measure, report."""
    config = EngineConfig(
        real_model_folder(), "bench", device=options.device, threads=options.threads, kv_memory_mb=options.kv_memory_mb
    )
    runner = TorchRunner(config)
    capabilities = await runner.load(EngineIdentity("bench", 1, ""), lambda _stage, _share: None)
    try:
        times = await measure(runner, capabilities, options)
        report(times, {cell: work_of(batch_of(cell, capabilities)) for cell in times}, runner.device, options)
    finally:
        await runner.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=170.0, help="of measuring")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory-mb", type=int, default=1024)
    parser.add_argument("--picture", type=Path, help="a PNG or SVG file to draw into; needs matplotlib")
    asyncio.run(main(parser.parse_args()))
