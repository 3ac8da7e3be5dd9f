"""The worth of each policy in the lab: the highest rate at which it keeps the SLO, by workload.

8 workers of Llama-3.1-70B, each on four H100, unless asked otherwise. Rows are policies, columns workloads. There is
a table for 90 % of requests, one for 90 % of work, and one for both. Figures are relative to the best static split in
hindsight, as shipped ("the knee"). `fulcrum` has roles that stand still, the best split in hindsight. `fulcrum-auto`
is the live planner. The last line is JSON. Four short workloads by default; `--eight` has all of them, as short.

What is in libs/policy was tuned on seeds 1 to 3 and on stretches of traces that begin before 1,500 s. `--held-out`
draws other seeds, and takes traces from 1,680 s on.

A search for the highest rate takes a dozen runs a seed; `--share` takes one. It runs each policy on held-out requests
at a share of one policy's highest rates, as `--out` kept them, over several seeds: good requests and work, with
intervals of 95 %. A policy that keeps 90 % there beats that share.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from math import prod, sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

from rich.table import Table

from deploy.compile import run_compiled
from libs.cli.lab.runs import parse_wrong
from libs.lab.experiment import Experiment
from libs.lab.hardware import resolve
from libs.lab.policies import OFFLINE, has_hindsight
from libs.lab.search import Measure, SearchResult, fluid_rate
from libs.lab.slo import parse_slo
from libs.lab.study import quiet, run_named, scaled, search_measures
from load.lab.fidelity import is_there, trace_of
from load.measure import show, titled_table

MOONCAKE, AZURE = "mooncake_conversation.jsonl", "azure_code_2023.csv"
EIGHT: Final = {
    "flipflop2": "flipflop:rate=6,seconds=80,period=2,isl=3000,osl=300",
    "flipflop10": "flipflop:rate=6,seconds=80,period=10,isl=3000,osl=300",
    "flipflop60": "flipflop:rate=6,seconds=240,period=60,isl=3000,osl=300",
    "chat-flood": "chat-flood:rate=6,seconds=90,isl=1500,osl=300,flood_rate=2,flood_seconds=20",
    "evening-writing": "evening-writing:rate=3,seconds=240",
    "both": "both:rate=3,seconds=180,flood_rate=2,flood_seconds=20",
    "mooncake": f"{MOONCAKE}@600+120",
    "azure-code": f"{AZURE}@1200+120",
}
QUICK: Final = {name: EIGHT[name] for name in ("flipflop10", "chat-flood", "mooncake", "azure-code")}
POLICIES: Final = (
    "static",
    "static+order+guard",
    "fulcrum-mixed",
    "fulcrum-auto",
    "aggregated",
    "aggregated+order+guard",
    "arrow",
    "arrow+order+guard",
    "arrow+ours",
    "dynamo-load",
    "dynamo-load+order+guard",
    "dynamo-load+ours",
)
WARM_UP: Final = 0.15
# Shares of a trace that are served and not scored.
TAIL: Final = 0.1
# Share of the fluid bound at which a search begins.
START: Final = 0.55
# After the last arrival, beside the time that the longest answer may take.
OVERTIME_S: Final = 60.0
HELD_OUT_SEED: Final = 101
# A held-out stretch of a trace begins so much later. Azure's two minutes from 2,400 s on have requests in four
# seconds alone, so it takes those before them.
HELD_OUT_LATER_S: Final = {MOONCAKE: 1200.0, AZURE: 1080.0}
# max_tokens of an answer, as its client sets it; policies do not see its true length.
ALLOWED_TOKENS: Final = 4096
MEASURES: Final[Sequence[Measure]] = ("both", "requests", "work")


@dataclass(frozen=True, slots=True)
class Cell:
    workload: str
    policy: str
    wrong: str = ""
    """The wrong facts that the cluster is given, in the syntax of `fulcrum lab run --wrong`."""


# The highest rate, by what has to be good.
Edges = dict[Measure, SearchResult]
# Fluid bound of a workload.
Bounds = dict[str, dict[Measure, float]]


def main() -> None:
    options = _arguments()
    if not options.plain:
        run_compiled("load.lab.bench_lab")
    quiet()
    if options.share:
        print(json.dumps(_at_share(options)))
        return
    started = time.monotonic()
    names = options.workloads.split(",") if options.workloads else list(EIGHT if options.eight else QUICK)
    if unknown := [name for name in names if name not in EIGHT]:
        raise SystemExit(f"no workload {', '.join(unknown)}: there are {', '.join(EIGHT)}")
    workloads = {name: text for name, text in EIGHT.items() if name in names and is_there(text)}
    if not workloads:
        raise SystemExit("these workloads are traces: FULCRUM_DATA has to name the folder with them, see docs/data.md")
    policies = options.policies.split(",") if options.policies else POLICIES
    cells = [Cell(w, p, x) for x in ("", *options.wrong) for w in workloads for p in policies]
    base = Base(
        options.workers, options.model, options.device, options.slo, workloads, options.seeds, held_out=options.held_out
    )  # fmt: skip
    bounds: Bounds = {}
    for workload in workloads:
        experiment = base.experiment(Cell(workload, ""))
        bounds[workload] = {measure: fluid_rate(experiment, measure) for measure in MEASURES}
    found: dict[Cell, Edges] = {}
    for cell, edges in _search(base, cells, options.jobs or os.cpu_count() or 1):
        found[cell] = edges
        rates = ", ".join(f"{name} {edge.rate_scale:.2f}" for name, edge in edges.items())
        print(f"{len(found)} of {len(cells)}: {cell.policy} on {cell.workload} {cell.wrong}: {rates}", file=sys.stderr)
        if options.out:
            figures = _figures(base, found, bounds, round(time.monotonic() - started, 1))
            options.out.write_text(json.dumps(figures, indent=1) + "\n")
    for measure in MEASURES:
        show(_table(found, workloads, policies, bounds, measure=measure))
    if options.wrong:
        show(_lost(found, workloads, policies, options.wrong))
    figures = _figures(base, found, bounds, round(time.monotonic() - started, 1))
    print(json.dumps(figures))


def _figures(base: "Base", found: dict[Cell, Edges], bounds: Bounds, wall_s: float) -> Any:
    """Return what `--out` keeps, also of a bench that is ended early."""
    return {
        "bench": "lab", "workers": base.workers, "model": base.model, "device": base.device, "slo": base.slo,
        "seeds": base.seeds, "held_out": base.held_out, "wall_s": wall_s,
        "cells": [{**asdict(cell), "rate_scale": round(edges["both"].rate_scale, 4),
                   "by": {each: round(edge.rate_scale, 4) for each, edge in edges.items()},
                   "fluid_bound": {k: round(v, 4) for k, v in bounds[cell.workload].items()},
                   "roles": edges["both"].reports[0].roles if edges["both"].reports else "",
                   "aborted": sum(each.score.aborted for each in edges["both"].reports),
                   "role_moves": edges["both"].reports[0].role_moves if edges["both"].reports else 0}
                  for cell, edges in found.items()],
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Base:
    workers: int
    model: str
    device: str
    slo: str
    workloads: dict[str, str]
    seeds: int
    held_out: bool = False
    """True if seeds and stretches of traces differ from the ones used for tuning."""

    def experiment(self, cell: Cell, seed: int = 0) -> Experiment:
        """Return the cell's experiment at the workload's own rate, drawn by this seed or by the usual one."""
        text, seed = self.workloads[cell.workload], seed or (HELD_OUT_SEED if self.held_out else 1)
        later_s = HELD_OUT_LATER_S.get(text.partition("@")[0], 0.0) if self.held_out else 0.0
        trace = trace_of(text, seed=seed, later_s=later_s)
        seconds = trace.duration_ns / 1e9
        slo = parse_slo(self.slo)
        # The longest answer at the pace that the SLO allows: a policy that uses it would seem not to finish.
        pace_s = max(each.output_tokens for each in trace.requests) * slo.tpot_ns / 1e9
        return Experiment(
            trace,
            resolve(self.model, self.device),
            self.workers,
            slo,
            seed=seed,
            overtime_s=OVERTIME_S + pace_s,
            warm_up_s=WARM_UP * seconds,
            tail_s=TAIL * seconds,
            wrong=parse_wrong(cell.wrong.split("+") if cell.wrong else ()),
            allowed_tokens=ALLOWED_TOKENS,
        )


def _search(base: Base, cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, Edges]]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet) as pool:
        # Searches that try splits take longest; begun last, one of them would keep a single core busy at the end.
        longest_first = sorted(cells, key=lambda cell: not has_hindsight(cell.policy))
        cell_of = {pool.submit(_find, base, cell): cell for cell in longest_first}
        try:
            for future in as_completed(cell_of):
                yield cell_of[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _find(base: Base, cell: Cell) -> Edges:
    experiment = base.experiment(cell)
    start = START * fluid_rate(experiment)
    measures: Sequence[Measure] = ("both",) if cell.policy == OFFLINE or cell.wrong else MEASURES
    return search_measures(experiment, cell.policy, "superpose", base.seeds, measures=measures, start=start, quick=True)


def _edge(found: dict[Cell, Edges], cell: Cell, measure: Measure) -> float:
    """Return the highest rate; 0 where none was searched."""
    edges = found.get(cell, {})
    return edges[measure].rate_scale if measure in edges else 0.0


def _lost(found: dict[Cell, Edges], workloads: dict[str, str], policies: Sequence[str], wrongs: Sequence[str]) -> Table:
    """Return the share of the highest rate that is left where the cluster is wrong about itself."""
    title = "Highest rate, relative to that of a cluster that is wrong about nothing"
    shown = titled_table(title, "policy", "wrong", *workloads, "geomean", left=("wrong",))
    for policy in policies:
        for wrong in wrongs:
            right = [_edge(found, Cell(w, policy), "both") for w in workloads]
            there = [_edge(found, Cell(w, policy, wrong), "both") for w in workloads]
            shown.add_row(policy, wrong, *_cells([a / b if b else None for a, b in zip(there, right, strict=True)]))
    return shown


def _table(
    found: dict[Cell, Edges], workloads: dict[str, str], policies: Sequence[str], bounds: Bounds, *, measure: Measure
) -> Table:
    good = "requests and work" if measure == "both" else measure
    title = f"Highest rate by {good}, relative to the best static split"
    shown = titled_table(title, "policy", *workloads, "geomean")

    def relative(workload: str, rate: float) -> float | None:
        knee = _edge(found, Cell(workload, "static"), measure)
        return rate / knee if knee else None

    for policy in policies:
        row = [relative(w, _edge(found, Cell(w, policy), measure)) for w in workloads]
        shown.add_row(policy, *_cells(row))
    shown.add_row("fluid bound", *_cells([relative(w, bounds[w][measure]) for w in workloads]), style="dim")
    rates = [f"{_edge(found, Cell(w, 'static'), measure):.2f}x" for w in workloads]
    shown.add_row("(knee, times the trace's rate)", *rates, "", style="dim")
    return shown


def _cells(row: list[float | None]) -> list[str]:
    known = [value for value in row if value]
    geomean = prod(known) ** (1 / len(known)) if len(known) == len(row) else None
    return [f"{value:.2f}" if value else "–" for value in (*row, geomean)]


KEPT_EDGES: Final = Path(__file__).parents[2] / "docs/figures/lab-held-out.json"
SHARE_POLICIES: Final = (
    "fulcrum-auto",
    "aggregated+order+guard",
    "taichi",
    "taichi+order+guard",
    "taichi-flow+order+guard",
    "llm-d-latency",
    "llm-d-latency-most+order+guard",
    "sglang-flip",
    "sglang-flip+order+guard",
    "sglang-flip+ours",
)
T95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t from one degree of freedom on."""


class Run(NamedTuple):
    workload: str
    policy: str
    seed: int
    rate: float


class Shares(NamedTuple):
    requests: float
    work: float
    least_class: float
    role_moves: int


def _at_share(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run policies at `--share` of the kept rates, print a table, and return a row for each run."""
    kept = json.loads(options.of.read_text())
    edges = {each["workload"]: each["rate_scale"] for each in kept["cells"] if each["policy"] == options.edge_of}
    wanted = options.workloads.split(",") if options.workloads else QUICK
    workloads = [name for name in wanted if name in edges and is_there(EIGHT[name])]
    policies = options.policies.split(",") if options.policies else SHARE_POLICIES
    base = Base(kept["workers"], kept["model"], kept["device"], kept["slo"], EIGHT, 1, held_out=True)
    seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + options.seeds)
    runs = [Run(w, p, s, round(edges[w] * options.share, 4)) for s, w, p in product(seeds, workloads, policies)]
    found: dict[Run, Shares] = {}
    with ProcessPoolExecutor(options.jobs or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for each, shares in zip(runs, pool.map(_run, [base] * len(runs), runs), strict=True):
            found[each] = shares
            print(f"{len(found)} of {len(runs)}: {each.policy} on {each.workload}: {shares}", file=sys.stderr)
    title = f"Good requests / work at {options.share:g} of the highest rate of {options.edge_of}, {options.seeds} seeds"
    shown = titled_table(title, "policy", *workloads)
    for policy in policies:
        cells = [[found[each] for each in runs if (each.workload, each.policy) == (w, policy)] for w in workloads]
        shown.add_row(policy, *map(_cell, cells))
    show(shown)
    return [{**each._asdict(), **shares._asdict()} for each, shares in found.items()]


def _run(base: Base, each: Run) -> Shares:
    quiet()
    experiment = scaled(base.experiment(Cell(each.workload, each.policy), each.seed), each.rate, "superpose")
    report = run_named(experiment, each.policy)
    score = report.score
    least = min(score.by_class.values(), default=1.0)
    return Shares(score.slo_attainment, score.work_attainment, least, report.role_moves)


def _cell(shares: Sequence[Shares]) -> str:
    return f"{_interval([each.requests for each in shares])} / {_interval([each.work for each in shares])}"


def _interval(values: Sequence[float]) -> str:
    """Return the mean in percent and the half width of its interval."""
    if len(values) < 2:
        return f"{values[0] * 100:.1f}"
    half = T95[min(len(values) - 2, len(T95) - 1)] * stdev(values) / sqrt(len(values))
    return f"{mean(values) * 100:.1f} ± {half * 100:.1f}"


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eight", action="store_true", help="all eight workloads, as short as the quick ones")
    parser.add_argument("--held-out", action="store_true", help="seeds and stretches that nothing was tuned on")
    parser.add_argument(
        "--wrong", nargs="*", default=[], help="e.g. telemetry=500 steps=0.2 slow=0:2 hints=0.05: each apart"
    )
    parser.add_argument("--policies", help="names with commas between; static has to be one of them")
    parser.add_argument("--workloads", help="names with commas between")
    parser.add_argument("--seeds", type=int, help="superpositions a rate; 1 by default, 3 with --share")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--slo", default="ttft=max(2s,3x),tpot=50ms")
    parser.add_argument("--jobs", type=int, default=0, help="searches at a time; 0: as many as there are cores")
    parser.add_argument("--plain", action="store_true", help="not compiled, with equal figures in three times the time")
    parser.add_argument("--out", type=Path, help="keep the figures here too")
    parser.add_argument("--share", type=float, help="run at this share of kept rates in place of a search, e.g. 1")
    parser.add_argument("--of", type=Path, default=KEPT_EDGES, help="with --share: figures that --out kept")
    parser.add_argument("--edge-of", default="fulcrum-auto", help="with --share: the policy whose rates are taken")
    options = parser.parse_args()
    options.seeds = options.seeds or (3 if options.share else 1)
    return options


if __name__ == "__main__":
    main()
