"""How well the number of active models is predicted, and what is reserved for them: made days, and public logs.

Each kind of day is made with a seed that nothing was tuned on (`--seeds`); its first third is learned from and not
scored. Public logs are read from the folder that FULCRUM_DATA names and left out where they are absent; Aegaeon's last
a minute or two, so their windows are seconds. A row a log; at the end one JSON line.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from libs.lab.models.backtest import Backtest, BacktestSettings, backtest
from libs.lab.models.generate import generate_usage
from libs.lab.models.read import read_usage
from libs.lab.models.usage import UsageLog

KINDS: Final = (
    "poisson",
    "poisson:zipf=1,sizes=0.3",
    "gamma:cv=2",
    "gamma:cv=4",
    "daily",
    "surge:cv=1,correlation=0.1",
    "surge:cv=1,correlation=0.3",
    "shock:correlation=0.1",
    "shock:correlation=0.3",
    "all",
)
PUBLIC: Final = {
    "alibaba_genai_2024-11.csv": BacktestSettings(),
    "aegaeon_synth_80models_0.1rps.csv": BacktestSettings(window_s=1.0, period_s=30.0),
    "aegaeon_synth_40models_0.1rps.csv": BacktestSettings(window_s=1.0, period_s=30.0),
}
INDEPENDENT: Final = "independent models, not calibrated"


def main() -> None:
    """Print table and JSON line; Ctrl-C keeps what is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=";".join(KINDS), help="specs of `fulcrum models generate`, with ; between")
    parser.add_argument("--seeds", default="101", help="with commas between")
    parser.add_argument("--no-public", action="store_true", help="made days only")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="length of a made day")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started_s = time.monotonic()
    try:
        for kind in filter(None, options.kinds.split(";")):
            for seed in map(int, options.seeds.split(",")):
                spec = f"{kind}{',' if ':' in kind else ':'}seconds={options.seconds:g}"
                rows.append(_run(generate_usage(spec, seed=seed), f"{kind} seed {seed}", BacktestSettings()))
        for name, settings in {} if options.no_public else PUBLIC.items():
            path = Path(os.environ.get("FULCRUM_DATA", "")) / name
            if path.is_file():
                rows.append(_run(read_usage(path), name, settings))
    except KeyboardInterrupt:
        print("interrupted: what follows is what was done", file=sys.stderr)
    _show(rows)
    print(json.dumps({"bench": "models-forecast", "wall_s": round(time.monotonic() - started_s, 1), "logs": rows}))


def _run(log: UsageLog, name: str, settings: BacktestSettings) -> dict[str, Any]:
    print(name, file=sys.stderr, flush=True)
    started_s = time.monotonic()
    found: Backtest = backtest(log, settings)
    figures = found.as_json()
    wall_s = time.monotonic() - started_s
    return {"log": name, **figures, "ms_per_window": round(1e3 * wall_s / found.done, 2)}


def _show(rows: list[dict[str, Any]]) -> None:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    titles = ("log", "windows", "active", "predicted", "covered", "95 % interval", "GPUs", "hindsight", "cost", "held",
              "independent", "Poisson", "keep 60 s", "keep 300 s", "one each")  # fmt: skip
    for title in titles:
        shown.add_column(title, justify="left" if title == "log" else "right", no_wrap=True)
    for row in rows:
        others = {each["policy"]: each for each in row["baselines"]}
        low, high = row["p99_coverage_interval"]
        cells = [
            row["log"], str(row["windows"]), f"{row['active_mean']:.2f}", f"{row['predicted_mean']:.2f}",
            f"{row['p99_coverage']:.2%}", f"{low:.2%} to {high:.2%}", f"{row['reserved_gpus']:.2f}",
            f"{row['clairvoyant_gpus']:.2f}", "kept" if row["keeps_cost"] else "MISSED",
        ]  # fmt: skip
        names = ("fulcrum, held for a period", INDEPENDENT, "fixed Poisson rates", "keep-alive 60 s",
                 "keep-alive 300 s", row["baselines"][-1]["policy"])  # fmt: skip
        cells += [f"{others[name]['p99_coverage']:.1%}/{others[name]['reserved_gpus']:.1f}" for name in names]
        shown.add_row(*cells)
    console = Console(width=220, highlight=False)
    console.print(shown)
    console.print("Baselines: windows covered / GPUs. Hindsight: constant for each planning period of an hour.")


if __name__ == "__main__":
    main()
