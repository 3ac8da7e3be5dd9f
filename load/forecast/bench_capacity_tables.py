"""Capacity tables: what they take, and how far they are from a search by the lab alone.

    python -m load.forecast.bench_capacity_tables [--sizes 1,2] [--out FILE]

Rows are profile, SLO, mean lengths and the coefficient of variation of gaps between arrivals. CPU time.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

from libs.capacity.measure import Bench, PlanTraffic, made_lengths
from libs.lab.hardware import resolve
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.policy.capacity.plan import PHASES

CASES: Final = (
    ("llama-3.1-8b", "h100", "ttft=2s,tpot=50ms", 1000, 200, 1.0),
    ("llama-3.1-8b", "h100", "ttft=1s,tpot=15ms", 2000, 200, 1.0),
    ("llama-3.1-8b", "h100", "ttft=500ms,tpot=30ms", 4000, 100, 2.0),
    ("llama-3.1-8b", "h100", "ttft=2s,tpot=50ms", 300, 400, 3.0),
    ("llama-3.1-8b", "h100", "ttft=3s,tpot=20ms", 8000, 400, 1.0),
)
"""Model, device, SLO, prompt and output tokens, gaps."""


def measure(case: tuple[str, str, str, int, int, float], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Both tables of one case."""
    model, device, slo, prompt, output, cv = case
    traffic = PlanTraffic(made_lengths(prompt, output), cv)
    bench = Bench(resolve(model, device), parse_slo(slo), traffic, 256)
    began = time.process_time()
    quick = bench.tables(sizes=sizes)
    between = time.process_time()
    slow = bench.search_tables(sizes=sizes)
    ended = time.process_time()
    row: dict[str, Any] = {"case": list(case), "quick_s": round(between - began, 1), "lab_s": round(ended - between, 1)}
    for phase in PHASES:
        row[phase] = {
            "workers": list(sizes),
            "quick": [round(each, 3) for each in quick[phase].work],
            "lab": [round(each, 3) for each in slow[phase].work],
        }
    return row


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4", help="workers of a pool")
    parser.add_argument("--out", type=Path, help="JSON goes there too")
    parser.add_argument("--cases", default="", help="places of cases, all by default, e.g. 0,2")
    asked = parser.parse_args()
    quiet()
    sizes = tuple(int(each) for each in asked.sizes.split(","))
    rows = []
    print(
        "| case | tables, s | by the lab alone, s | prefill: quick, lab | decode: quick, lab |\n|---|---|---|---|---|"
    )
    for place, case in enumerate(CASES):
        if asked.cases and str(place) not in asked.cases.split(","):
            continue
        row = measure(case, sizes)
        rows.append(row)
        cells = [
            f"{', '.join(map(str, row[phase]['quick']))}; {', '.join(map(str, row[phase]['lab']))}" for phase in PHASES
        ]
        name = ", ".join(map(str, case))
        print(f"| {name} | {row['quick_s']} | {row['lab_s']} | {cells[0]} | {cells[1]} |", flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
