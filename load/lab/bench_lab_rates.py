"""Good requests and work of each policy at the same rates, over several seeds, with intervals of 95 %.

A search for the highest rate takes a dozen runs a seed; this takes one. Rates are a share of one policy's highest rate
on each workload, read from `--of` (`bench_lab.py --out`). A policy that keeps 90 % there beats that share. Seeds draw
other superpositions of the same held-out trace. The last line is JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

from libs.lab.study import quiet, run_named, scaled
from load.lab.bench_lab import EIGHT, HELD_OUT_SEED, Base, Cell
from load.lab.compile_lab import run_compiled
from load.lab.fidelity import is_there
from load.measure import show, titled_table

OF: Final = Path(__file__).parents[2] / "docs/figures/lab-held-out.json"
POLICIES: Final = (
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
WORKLOADS: Final = ("flipflop10", "chat-flood", "mooncake", "azure-code")
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


def main() -> None:
    asked = _arguments()
    if not asked.plain:
        run_compiled("load.lab.bench_lab_rates")
    quiet()
    kept = json.loads(asked.of.read_text())
    edges = {each["workload"]: each["rate_scale"] for each in kept["cells"] if each["policy"] == asked.edge_of}
    workloads = [name for name in asked.workloads.split(",") if name in edges and is_there(EIGHT[name])]
    policies = asked.policies.split(",")
    base = Base(kept["workers"], kept["model"], kept["device"], kept["slo"], EIGHT, 1, held_out=True)
    seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + asked.seeds)
    runs = [Run(w, p, s, round(edges[w] * asked.share, 4)) for s, w, p in product(seeds, workloads, policies)]
    found: dict[Run, Shares] = {}
    with ProcessPoolExecutor(asked.jobs or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for each, shares in zip(runs, pool.map(_run, [base] * len(runs), runs), strict=True):
            found[each] = shares
            print(f"{len(found)} of {len(runs)}: {each.policy} on {each.workload}: {shares}", file=sys.stderr)
    title = f"Good requests / work at {asked.share:g} of the highest rate of {asked.edge_of}, {asked.seeds} seeds"
    shown = titled_table(title, "policy", *workloads)
    for policy in policies:
        cells = [[found[each] for each in runs if (each.workload, each.policy) == (w, policy)] for w in workloads]
        shown.add_row(policy, *map(_cell, cells))
    show(shown)
    print(json.dumps([{**each._asdict(), **shares._asdict()} for each, shares in found.items()]))


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
    parser.add_argument("--of", type=Path, default=OF, help="figures that `bench_lab.py --out` kept")
    parser.add_argument("--edge-of", default="fulcrum-auto", help="the policy whose highest rates are taken")
    parser.add_argument("--share", type=float, default=1.0, help="of those rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES), help="names with commas between")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names with commas between")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0: as many as there are cores")
    parser.add_argument("--plain", action="store_true", help="not compiled")
    return parser.parse_args()


if __name__ == "__main__":
    main()
