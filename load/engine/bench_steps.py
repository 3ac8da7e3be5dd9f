"""`make bench-steps`: how well the step-time model predicts steps of the torch engine that it has not seen.

Runs a grid of chunk x batch x context on the runner itself (pure prefill, pure decode, mixed) and reports relative
errors on cells that the fit has not seen: every cell is judged by a model that was fitted without its quarter of the
grid. Beside it, by the same two parts run separately: how much of a prompt chunk's cost hides in a decode step, and how
far off the split of mixed steps is; and whether the largest decode batch that by the model holds a TPOT target does.
Rounds take turns over the whole grid, so that a noisy moment does not fall on one cell. stdout: tables, then one JSON
object as the last line, which `--again` judges anew; stderr: progress.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np

from libs.engine.config import EngineConfig
from libs.engine.port import Capabilities, EngineIdentity
from libs.engine.runner import Runner
from libs.engine.torch.runner import TorchRunner
from libs.perfmodel.learner import StepKind, StepTimeLearner
from libs.perfmodel.priors import prior_step_time
from libs.policy.step_time import StepTimeModel, split_step_ns
from libs.testing.engines.real_model import real_model_folder
from load.engine import decode_target
from load.engine.decode_target import HeldTarget
from load.engine.step_grid import Cell, batch_of, folds, grid

COLOURS = {StepKind.PREFILL: "tab:cyan", StepKind.DECODE: "tab:green", StepKind.MIXED: "tab:orange"}
CPU_KV_MEMORY_MB = 1024
GPU_KV_MEMORY_MB = 32 << 10
"""256 sequences of 4,096 tokens take 23 GB of SmolLM2's KV in 16 bits; what does not fit is left out of the grid."""
Times = dict[Cell, list[int]]
"""Nanoseconds of each cell, one a round."""


async def measure(runner: Runner, capabilities: Capabilities, options: argparse.Namespace) -> Times:
    """Nanoseconds of every cell in every round, the order shuffled anew each time; the first round is not counted."""
    cells, random = grid(runner.device, capabilities), np.random.default_rng(5)
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


def fit(times: Times, cells: list[Cell], prior: StepTimeModel) -> StepTimeModel:
    """What a worker that starts from `prior` would have learned of these cells, a step at a time."""
    learner = StepTimeLearner(prior)
    for turn in range(max(map(len, times.values()))):
        for cell in cells:
            if turn < len(times[cell]):
                learner.add(cell.work, times[cell][turn])
    learner.refit()
    return learner.model


def predicted_ns(times: Times, prior: StepTimeModel) -> dict[Cell, float]:
    """The predicted time of every cell, by a model that was fitted without its part of the grid."""
    found = {}
    for held in folds(list(times)):
        model = fit(times, [cell for cell in times if cell not in held], prior)
        found.update({cell: model.step_ns(cell.work) for cell in held})
    return found


def error_table(times: Times, predicted: dict[Cell, float]) -> dict[str, dict[str, float]]:
    """By kind of step: relative errors of single steps, of the cells' medians, and the scatter of equal steps."""
    table = {}
    for kind in StepKind:
        mine = [cell for cell in times if cell.kind is kind]
        medians = {cell: statistics.median(times[cell]) for cell in mine}
        steps = [abs(predicted[cell] / ns - 1) for cell in mine for ns in times[cell]]
        cells = [abs(predicted[cell] / medians[cell] - 1) for cell in mine]
        scatter = [abs(ns / medians[cell] - 1) for cell in mine for ns in times[cell]]
        table[kind.value] = {"cells": len(mine), "steps": len(steps)} | {
            name: round(float(np.quantile(values, share)), 4)
            for name, values, share in (
                ("step_error_p50", steps, 0.5),
                ("step_error_p90", steps, 0.9),
                ("median_error_p50", cells, 0.5),
                ("median_error_p90", cells, 0.9),
                ("scatter_p50", scatter, 0.5),
            )
        }
    return table


def parts(times: Times) -> list[tuple[Cell, float, float, float]]:
    """(mixed cell, its median ns, those of its chunk alone and of its decodes alone)."""
    medians = {cell: statistics.median(durations) for cell, durations in times.items()}
    mixed = [cell for cell in times if cell.kind is StepKind.MIXED]
    return [(cell, medians[cell], medians[Cell(cell.chunk, None)], medians[Cell(None, cell.decode)]) for cell in mixed]


def ride_along(times: Times) -> dict[int, float]:
    """By chunk size, the share of the chunk's own cost that the mixed step does not show: median over decodes."""
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for cell, both, chunk, decode in parts(times):
        assert cell.chunk is not None
        shares[cell.chunk[0]].append((chunk + decode - both) / chunk)
    return {tokens: statistics.median(found) for tokens, found in sorted(shares.items())}


def split_errors(times: Times, model: StepTimeModel) -> list[float]:
    """Of each mixed cell, how far the model's prefill share is from that of its parts run separately, 0..1."""
    unit = 1 << 20
    return [
        abs(split_step_ns(model, cell.work, unit)[0] / unit - chunk / (chunk + decode))
        for cell, _, chunk, decode in parts(times)
    ]


def report(
    times: Times, device: str, prior: StepTimeModel, targets: list[HeldTarget], options: argparse.Namespace
) -> None:
    """Fit, judge, print."""
    predicted, model = predicted_ns(times, prior), fit(times, list(times), prior)
    table = error_table(times, predicted)
    names = list(table[StepKind.MIXED.value])
    print(f"{'not seen':<10}" + "".join(f"{name:>18}" for name in names))
    for kind, row in table.items():
        print(
            f"{kind:<10}" + "".join(f"{row[name]:>18{'d' if isinstance(row[name], int) else '.1%'}}" for name in names)
        )
    shares, off = ride_along(times), split_errors(times, model)
    print("\nshare of a prompt chunk's own cost that hides in a decode step, by its tokens:")
    print("  ".join(f"{tokens}: {share:.0%}" for tokens, share in shares.items()))
    print(
        f"split of mixed steps against their parts run separately, points off: {100 * statistics.mean(off):.1f} mean,"
    )
    print(f"  {100 * max(off):.1f} at most; interference {model.interference:.2f}")
    if targets:
        print("\n" + decode_target.table(targets))
    if options.picture:
        draw(options.picture, predicted, times)
    print(
        json.dumps(
            {
                "device": device,
                "threads": options.threads,
                "rounds": min(map(len, times.values())),
                "held_out": table,
                "ride_along_share": {str(tokens): round(share, 4) for tokens, share in shares.items()},
                "split_error": {"mean": round(statistics.mean(off), 4), "max": round(max(off), 4)},
                "decode_targets": decode_target.figures(targets),
                "prior": asdict(prior),
                "model": {name: round(value, 4) for name, value in asdict(model).items()},
                "cells": [
                    {"chunk": cell.chunk, "decode": cell.decode, "ms": [round(ns / 1e6, 2) for ns in durations]}
                    for cell, durations in times.items()
                ],
            }
        )
    )


def recorded(file: Path) -> tuple[Times, str, StepTimeModel]:
    """(times, device, prior) of the last line of an earlier run; older ones did not print their prior."""
    found = json.loads(file.read_text().splitlines()[-1])
    times = {
        Cell(*(tuple(part) if part else None for part in (each["chunk"], each["decode"]))): [
            round(ms * 1e6) for ms in each["ms"]
        ]
        for each in found["cells"]
    }
    device = found["device"]
    prior = StepTimeModel(**found["prior"]) if "prior" in found else prior_step_time("torch", device)
    return times, device, prior


def kv_memory_mb(options: argparse.Namespace) -> int:
    """What was asked for, else what the grid of the device needs of it and any GPU of today has."""
    on_gpu = options.device.startswith("cuda")
    return int(options.kv_memory_mb or (GPU_KV_MEMORY_MB if on_gpu else CPU_KV_MEMORY_MB))


def draw(file: Path, predicted_ns: dict[Cell, float], times: dict[Cell, list[int]]) -> None:
    """The median of each cell against what a model said that had not seen it; in grey they differ by < 10 %."""
    import matplotlib as mpl  # noqa: PLC0415 (only where a picture is asked for)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(6, 5.4), layout="constrained")
    for kind, colour in COLOURS.items():
        cells = [cell for cell in times if cell.kind is kind]
        x = [statistics.median(times[cell]) / 1e6 for cell in cells]
        axes.scatter(x, [predicted_ns[cell] / 1e6 for cell in cells], s=26, color=colour, label=kind.value, alpha=0.7)
    edges = [statistics.median(durations) / 1e6 for durations in times.values()]
    line = [min(edges) * 0.9, max(edges) * 1.1]
    axes.plot(line, line, color="grey", linewidth=0.8)
    axes.fill_between(line, [x * 0.9 for x in line], [x * 1.1 for x in line], color="grey", alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted without having seen it, ms")
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


async def main(options: argparse.Namespace) -> None:
    """Load, measure, report."""
    if options.again:
        report(*recorded(options.again), [], options)
        return
    config = EngineConfig(
        real_model_folder(), "bench", device=options.device, threads=options.threads, kv_memory_mb=kv_memory_mb(options)
    )
    runner = TorchRunner(config)
    capabilities = await runner.load(EngineIdentity("bench", 1, ""), lambda _stage, _share: None)
    try:
        prior = prior_step_time("torch", runner.device, capabilities.compute)
        times = await measure(runner, capabilities, options)
        targets = await decode_target.held_targets(runner, capabilities, fit(times, list(times), prior))
        report(times, runner.device, prior, targets, options)
    finally:
        await runner.close()


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--limit-s", type=float, default=170.0, help="of measuring")
    made.add_argument("--threads", type=int, default=0, help="0: torch's default")
    made.add_argument("--device", default="auto")
    made.add_argument("--kv-memory-mb", type=int, default=0, help="0: what the grid of --device needs")
    made.add_argument("--picture", type=Path, help="a PNG or SVG file to draw into; needs matplotlib")
    made.add_argument("--again", type=Path, help="judge the output of an earlier run in place of measuring")
    return made


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
