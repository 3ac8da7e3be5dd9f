"""Whether simulated workers that share a process are as busy as workers with a process each.

By hand: `python -m load.lab.bench_shared_process`. The same trace, in turns, on suites of 4 prefill and 4 decode
workers that differ in `--workers-per-process` alone; each pool's share of time by phase, from the metrics service, over
the window in which requests came. The aim is 1 point of difference. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import httpx

from libs.lab.traces.generate import generate
from libs.testing.suites.suite import running_suite
from load.lab.fidelity import Place, prompt_ids
from load.lab.fidelity_cases import LIVE, WARM_UP, short
from load.lab.fidelity_live import live_replay, settings, sim_settings

SPEC: Final = "poisson:rate=12,isl=1000,osl=40"
EACH: Final = 4
"""Workers of a pool."""
PHASES: Final = ("prefill", "decode", "kv_wait", "idle")
AIM_POINTS: Final = 1.0
SETTLE_S: Final = 2.0
"""Until the window's last telemetry has come in."""


def measured(place: Place, seconds: float, shared: int) -> dict[str, dict[str, float]]:
    """Share of time by phase, in percent, of each pool."""
    trace = short(generate(f"{SPEC},seconds={seconds:g}", seed=1))
    arguments = ["--engine", "sim", "--prefill", str(EACH), "--decode", str(EACH)]
    arguments += ["--workers-per-process", str(shared)] if shared > 1 else []
    with tempfile.TemporaryDirectory(prefix="shared-process-") as folder:
        env = {**settings(place, trace), **sim_settings(place), "FULCRUM_CACHE": str(Path(folder) / "cache")}
        with running_suite(Path(folder), *arguments, env=env) as suite:
            model = suite.ready["model"] or "sim"
            warm = short(generate(WARM_UP, seed=1))
            live_replay(suite.gateway, model, place, warm, prompt_ids(warm, seed=2))
            live_replay(suite.gateway, model, place, trace, prompt_ids(trace, seed=3))
            end_ms = time.time_ns() // 1_000_000
            time.sleep(SETTLE_S)
            asked: dict[str, str | int] = {"window": f"{int(seconds)}s", "end_unix_ms": end_ms}
            found = httpx.get(f"{suite.ready['metrics']}/v1/occupancy", params=asked).raise_for_status().json()
    return {pool["role"]: {phase: 100 * (pool[phase] or 0.0) for phase in PHASES} for pool in found["pools"]}


def main() -> None:
    """Run both in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load in each run")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    place, runs = LIVE["live-long"].case.place(), list[dict[str, Any]]()
    for number in range(asked.rounds):
        for shared in (1, EACH) if number % 2 == 0 else (EACH, 1):
            before = os.getloadavg()[0]
            runs.append({"shared": shared, "pools": measured(place, asked.seconds, shared), "load_before": before})
            print(f"round {number + 1}, {shared} a process: {runs[-1]['pools']}", file=sys.stderr)
    rows, worst = [], 0.0
    print("| pool | phase | separate, % | shared, % | difference, points | runs of one kind differ by |")
    print("|---|---|---|---|---|---|")
    for pool in ("prefill", "decode"):
        for phase in PHASES:
            by_kind = [[run["pools"][pool][phase] for run in runs if run["shared"] == kind] for kind in (1, EACH)]
            alone, together = map(statistics.fmean, by_kind)
            spread = max((abs(a - b) for kind in by_kind for a, b in combinations(kind, 2)), default=0.0)
            worst = max(worst, abs(together - alone))
            rows.append({"pool": pool, "phase": phase, "separate": alone, "shared": together, "spread": spread})
            print(f"| {pool} | {phase} | {alone:.2f} | {together:.2f} | {together - alone:+.2f} | {spread:.2f} |")
    print(
        json.dumps(
            {"bench": "shared-process", "worst_points": worst, "met": worst <= AIM_POINTS, "rows": rows, "runs": runs}
        )
    )


if __name__ == "__main__":
    main()
