"""What it costs to keep sporadic models loaded: GPU time held idle against cold starts, a row a rule.

Made days, and Alibaba's log where FULCRUM_DATA names a folder that holds it; the first third is learned from and not
counted. A cold start is weighed as 60, 300 and 1,200 GPU-seconds, at each of which Fulcrum's rule is run. At the end
one JSON line.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from libs.lab.models.generate import generate_usage
from libs.lab.models.keeping import RuleResult, hybrid_histogram, keep_for, replay_rule, replay_worth
from libs.lab.models.read import read_usage
from libs.lab.models.usage import UsageLog

MADE: Final = ("gamma:models=60,cv=4,rate=0.002", "poisson:models=60,rate=0.002", "daily:models=60,cv=4,rate=0.002")
MADE_TICK_S: Final = 10.0
PUBLIC, PUBLIC_TICK_S = "alibaba_genai_2024-11.csv", 30.0
COLD_COSTS_GPU_S: Final = (60.0, 300.0, 1200.0)
KEEP_ALIVES_S: Final = (60.0, 300.0, 600.0, 1200.0)
LOAD_S: Final = 5.0


def main() -> None:
    """Print tables and the JSON line; Ctrl-C keeps what is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=102)
    parser.add_argument("--no-public", action="store_true", help="made days only")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    try:
        found.extend(_run(spec, generate_usage(spec, seed=options.seed), MADE_TICK_S) for spec in MADE)
        path = Path(os.environ.get("FULCRUM_DATA", "")) / PUBLIC
        if path.is_file() and not options.no_public:
            found.append(_run(PUBLIC, read_usage(path), PUBLIC_TICK_S))
    except KeyboardInterrupt:
        print("interrupted: what follows is what was done", file=sys.stderr)
    print(json.dumps({"bench": "models-keep", "load_s": LOAD_S, "logs": found}))


def _run(name: str, log: UsageLog, tick_s: float) -> dict[str, Any]:
    print(name, file=sys.stderr, flush=True)
    from_s = log.end_s / 3
    plain = {"let go at once": keep_for(0.0)}
    plain |= {f"keep-alive {seconds:g} s": keep_for(seconds) for seconds in KEEP_ALIVES_S}
    plain["hybrid histogram"] = hybrid_histogram
    rules = [replay_rule(log, title, rule, from_s=from_s, load_s=LOAD_S) for title, rule in plain.items()]
    rules += [replay_worth(log, cost, tick_s=tick_s, from_s=from_s, load_s=LOAD_S) for cost in COLD_COSTS_GPU_S]
    _show(name, rules)
    return {"log": name, "rules": [asdict(each) for each in rules]}


def _show(name: str, rules: list[RuleResult]) -> None:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=name, title_justify="left")
    titles = [f"GPU-h at {cost:g}" for cost in COLD_COSTS_GPU_S]
    for title in ("rule", "idle GPU-h", "cold starts", "loads", *titles):
        shown.add_column(title, justify="left" if title == "rule" else "right", no_wrap=True)
    for each in rules:
        costs = [f"{each.cost_gpu_s(cost) / 3600:.1f}" for cost in COLD_COSTS_GPU_S]
        shown.add_row(each.rule, f"{each.idle_gpu_s / 3600:.1f}", f"{each.cold_starts:,}", f"{each.loads:,}", *costs)
    Console(width=160, highlight=False).print(shown)


if __name__ == "__main__":
    main()
