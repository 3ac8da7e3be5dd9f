"""What each policy is worth in the lab: the highest rate at which it keeps the SLO, by workload and interference.

8 workers of Llama-3.1-70B, each on four H100, unless asked otherwise. A row a policy, a column a workload; a figure is
relative to the best static split in hindsight, as shipped ("the knee"). `fulcrum` has roles that stand still, the best
split in hindsight; `fulcrum-auto` is the live planner. At the end one JSON line. Quick by default; `--full` has 16
workers, all workloads, all interferences and several seeds, and takes hours.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from libs.lab.bound import fluid_rate
from libs.lab.experiment import Experiment
from libs.lab.hardware import resolve
from libs.lab.search import Found
from libs.lab.slo import SloSpec, parse_slo
from libs.lab.study import quiet, search_named
from libs.lab.traces.generate import generate
from libs.lab.traces.read import read_trace
from libs.lab.traces.request import Trace
from load.lab.compile_lab import run_compiled

MOONCAKE, AZURE = "mooncake_conversation.jsonl", "azure_code_2023.csv"
QUICK: Final = {
    "flipflop10": "flipflop:rate=6,seconds=80,period=10,isl=3000,osl=300",
    "chat-flood": "chat-flood:rate=6,seconds=90,isl=1500,osl=300,flood_rate=2,flood_seconds=20",
    "mooncake": f"{MOONCAKE}@600+120",
    "azure-code": f"{AZURE}@1200+120",
}
FULL: Final = {
    "flipflop2": "flipflop:rate=12,seconds=300,period=2,isl=3000,osl=300",
    "flipflop10": "flipflop:rate=12,seconds=300,period=10,isl=3000,osl=300",
    "flipflop60": "flipflop:rate=12,seconds=600,period=60,isl=3000,osl=300",
    "chat-flood": "chat-flood:rate=12,seconds=600,isl=1500,osl=300,flood_rate=4",
    "evening-writing": "evening-writing:rate=6,seconds=1200",
    "both": "both:rate=6,seconds=1200,flood_rate=4",
    "mooncake": f"{MOONCAKE}@600+900",
    "azure-code": f"{AZURE}@600+1200",
}
POLICIES: Final = (
    "static", "fulcrum", "fulcrum-mixed", "fulcrum-auto", "aggregated", "arrow", "dynamo-load", "dynamo-throughput",
    "dynamo-both", "llm-d", "niyama", "taichi", "offline",
)  # fmt: skip
QUICK_POLICIES: Final = (
    "static",
    "static+guard",
    "fulcrum",
    "fulcrum-mixed",
    "fulcrum-auto",
    "aggregated",
    "aggregated+guard",
    "arrow",
    "arrow+ours",
    "dynamo-load",
    "dynamo-load+moves",
    "dynamo-load+ours",
    "llm-d",
    "llm-d+ours",
    "offline",
)
_OURS: Final = ("#0b6e4f", "#1f9d6f", "#6fd3a8")
_THEIRS: Final = ("#334155", "#94a3b8", "#b45309", "#f59e0b", "#7c3aed", "#be123c", "#0ea5e9", "#475569", "#d97706")
FULL_INTERFERENCES: Final = (0.0, 0.5, 1.0)
WARM_UP: Final = 0.15
TAIL: Final = 0.1
"""Shares of a trace that are served and not scored."""
START: Final = 0.55
"""Of the fluid bound: where a search begins."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One search."""

    workload: str
    policy: str
    interference: float | None


def main() -> None:
    """Search, show, print one JSON line."""
    asked = _arguments()
    if not asked.plain:
        run_compiled("load.lab.bench_lab")
    asked.workers = asked.workers or (16 if asked.full else 8)
    quiet()
    console = Console(file=sys.stdout, highlight=False, width=160)
    started = time.monotonic()
    asked_for = asked.workloads.split(",") if asked.workloads else list(FULL if asked.full else QUICK)
    workloads = {name: text for name, text in (FULL if asked.full else QUICK).items() if _there(text)}
    workloads = {name: text for name, text in workloads.items() if name in asked_for}
    policies = asked.policies.split(",") if asked.policies else POLICIES if asked.full else QUICK_POLICIES
    interferences = asked.interference or ((None, *FULL_INTERFERENCES) if asked.full else (None,))
    cells = [Cell(w, p, i) for i in interferences for w in workloads for p in policies]
    base = Base(asked.workers, asked.model, asked.device, asked.slo, workloads, asked.seeds or (3 if asked.full else 1))
    found: dict[Cell, Found] = {}
    for cell, edge in _search(base, cells, asked.jobs or os.cpu_count() or 1):
        found[cell] = edge
        print(f"{len(found)} of {len(cells)}: {cell.policy} on {cell.workload}: {edge.rate_scale:.2f}", file=sys.stderr)
    bounds = {(w, i): fluid_rate(base.experiment(w, i)) for w in workloads for i in interferences}
    for interference in interferences:
        console.print(_table(found, workloads, policies, interference, bounds))
    figures = {
        "bench": "lab", "workers": asked.workers, "model": asked.model, "device": asked.device, "slo": asked.slo,
        "seeds": base.seeds, "wall_s": round(time.monotonic() - started, 1),
        "cells": [{**asdict(cell), "rate_scale": round(edge.rate_scale, 4),
                   "fluid_bound": round(bounds[cell.workload, cell.interference], 4),
                   "roles": edge.reports[0].roles if edge.reports else "",
                   "role_moves": edge.reports[0].role_moves if edge.reports else 0}
                  for cell, edge in found.items()],
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(figures, indent=1) + "\n")
    if asked.picture and None in interferences:
        _draw(asked.picture, found, workloads, policies, bounds)
    print(json.dumps(figures))


@dataclass(frozen=True, slots=True)
class Base:
    """What all cells share."""

    workers: int
    model: str
    device: str
    slo: str
    workloads: dict[str, str]
    seeds: int

    def experiment(self, workload: str, interference: float | None) -> Experiment:
        """At the workload's own rate."""
        trace, slo = _trace(self.workloads[workload]), parse_slo(self.slo)
        return _experiment(trace, slo, self, interference)


def _experiment(trace: Trace, slo: SloSpec, base: Base, interference: float | None) -> Experiment:
    seconds = trace.duration_ns / 1e9
    made = Experiment(trace, resolve(base.model, base.device), base.workers, slo, overtime_s=60.0)
    return replace(made, interference=interference, warm_up_s=WARM_UP * seconds, tail_s=TAIL * seconds)


def _search(base: Base, cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, Found]]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet) as pool:
        asked = {pool.submit(_find, base, cell): cell for cell in cells}
        try:
            for future in as_completed(asked):
                yield asked[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _find(base: Base, cell: Cell) -> Found:
    experiment = base.experiment(cell.workload, cell.interference)
    start = START * fluid_rate(experiment)
    return search_named(experiment, cell.policy, "superpose", base.seeds, lambda line: None, start=start)


def _trace(text: str) -> Trace:
    name, cut, part = text.partition("@")
    if not cut:
        return generate(text, seed=1)
    start_s, seconds = map(float, part.split("+"))
    return read_trace(Path(os.environ["FULCRUM_DATA"]) / name, seed=1, start_s=start_s, seconds=seconds)


def _there(text: str) -> bool:
    name, cut, _ = text.partition("@")
    return not cut or (Path(os.environ.get("FULCRUM_DATA", "")) / name).is_file()


def _table(
    found: dict[Cell, Found], workloads: dict[str, str], policies: Sequence[str], interference: float | None,
    bounds: dict[tuple[str, float | None], float],
) -> Table:  # fmt: skip
    words = "as the profile has it" if interference is None else f"{interference:g}"
    shown = Table(title=f"Highest rate, relative to the best static split; interference {words}", title_justify="left",
                  box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")  # fmt: skip
    shown.add_column("policy")
    for name in (*workloads, "geomean"):
        shown.add_column(name, justify="right")

    def relative(workload: str, rate: float) -> float | None:
        knee = found.get(Cell(workload, "static", interference))
        return rate / knee.rate_scale if knee and knee.rate_scale else None

    for policy in policies:
        row = [relative(w, found[Cell(w, policy, interference)].rate_scale) for w in workloads]
        shown.add_row(policy, *_cells(row))
    shown.add_row("fluid bound", *_cells([relative(w, bounds[w, interference]) for w in workloads]), style="dim")
    rates = [f"{found[Cell(w, 'static', interference)].rate_scale:.2f}x" for w in workloads]
    shown.add_row("(knee, times the trace's rate)", *rates, "", style="dim")
    return shown


def _draw(
    path: Path, found: dict[Cell, Found], workloads: dict[str, str], policies: Sequence[str],
    bounds: dict[tuple[str, float | None], float],
) -> None:  # fmt: skip
    """Bars: of the fluid bound, what each policy reaches at the profile's own interference."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (only where a picture is asked for)

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(policies)
    ours, theirs = cycle(_OURS), cycle(_THEIRS)
    for place, policy in enumerate(policies):
        shares = [found[Cell(w, policy, None)].rate_scale / bounds[w, None] for w in workloads]
        axes.bar(
            [x + place * width for x in range(len(workloads))], shares, width, label=policy,
            color=next(ours if policy.startswith("fulcrum") else theirs), edgecolor="white", linewidth=0.5,
        )  # fmt: skip
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(workloads))], list(workloads))
    axes.set_ylim(0, 1)
    axes.set_ylabel("highest rate that keeps the SLO, of the fluid bound")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def _cells(row: list[float | None]) -> list[str]:
    known = [value for value in row if value]
    mean = prod(known) ** (1 / len(known)) if len(known) == len(row) else None
    return [f"{value:.2f}" if value else "–" for value in (*row, mean)]


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all workloads and interferences, three seeds: hours")
    parser.add_argument("--policies", help="names with commas between; static has to be one of them")
    parser.add_argument("--workloads", help="names with commas between")
    parser.add_argument("--interference", type=float, nargs="*", help="in place of the profile's own; several searches")
    parser.add_argument("--seeds", type=int, default=0, help="superpositions a rate; 0: 1, or 3 with --full")
    parser.add_argument("--workers", type=int, default=0, help="0: 8, or 16 with --full")
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--slo", default="ttft=max(2s,3x),tpot=50ms")
    parser.add_argument("--jobs", type=int, default=0, help="searches at a time; 0: as many as there are cores")
    parser.add_argument("--plain", action="store_true", help="not compiled, with equal figures in three times the time")
    parser.add_argument("--picture", type=Path, help="an SVG or PNG of it")
    parser.add_argument("--out", type=Path, help="keep the figures here too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
