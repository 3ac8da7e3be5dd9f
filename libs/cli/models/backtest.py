"""The command `fulcrum models backtest`: what a log's reservations would have been worth, as table, JSON and page."""

import json
import re
import sys
from pathlib import Path
from typing import Final

from libs.cli.console import make_console, plain_table
from libs.cli.lab.progress import noting
from libs.cli.lab.runs import rounded
from libs.cli.models.page import write_report
from libs.cli.report.page import make_folder
from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.models.backtest import Backtest, BacktestSettings, backtest
from libs.lab.models.read import read_usage

_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
LEAST_S, MOST_S = 0.01, 7 * 86_400.0


def seconds_of(text: str, name: str) -> float:
    """Return the seconds of `500ms`, `60s`, `5m`, `1h`, `1d`. Raises InvalidRequest."""
    found = _TIME.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not LEAST_S <= seconds <= MOST_S:
        raise InvalidRequest(f"--{name} is {quoted(text)}: it has to be a time such as 500ms, 60s, 5m, 1h, 7d at most")
    return seconds


def run_backtest(
    file: Path, *, window: str, confidence: float, period: str, report: Path | None, as_json: bool
) -> None:
    """Run the backtest, print it, and write the report if a folder is given. Raises InvalidRequest."""
    settings = BacktestSettings(
        window_s=seconds_of(window, "window"), confidence=confidence, period_s=seconds_of(period, "period")
    )
    if settings.period_s < settings.window_s:
        raise InvalidRequest(f"--period {period} is shorter than --window {window}")
    if report is not None:
        make_folder(report)
    try:
        with noting() as notes:
            notes.doing(f"reading {file.name}")
            log = read_usage(file, notes.doing)
            found = backtest(log, settings, notes.doing)
    except KeyboardInterrupt:
        print("fulcrum: interrupted before there was a window to score", file=sys.stderr)
        sys.exit(130)
    figures = rounded(found.as_json())
    if report is not None:
        write_report(report, found, figures)
    if as_json:
        print(json.dumps(figures))
    else:
        _show(found, report)
    if found.interrupted:
        sys.exit(130)


def _show(found: Backtest, report: Path | None) -> None:
    console, figures = make_console(), found.as_json()
    console.print(
        f"{figures['requests']:,} requests to {figures['models']:,} models; {figures['windows']:,} windows of "
        f"{figures['window_s']:g} s scored after {figures['warmup_windows']:,} to learn from"
    )
    for note in found.log.notes:
        console.print(note, style="dim")
    console.print(
        f"active at a time: {figures['active_mean']:.2f}, predicted {figures['predicted_mean']:.2f}; "
        f"GPUs at a window's peak: {figures['peak_mean_gpus']:.2f}, "
        f"predicted {figures['predicted_peak_mean_gpus']:.2f}\n"
    )
    shown = plain_table("policy", "covered", "95 % interval", "GPUs", "of hindsight's", "keeps", left=("policy",))
    for score in found.scores:
        keeps = [word for word, kept in (("p99", score.keeps_confidence), ("cost", score.keeps_cost)) if kept]
        shown.add_row(
            score.policy, f"{score.coverage:.2%}", f"{score.interval[0]:.2%} to {score.interval[1]:.2%}",
            f"{score.reserved_gpus:.2f}", f"{score.cost:.2f}x", ", ".join(keeps) or "–",
        )  # fmt: skip
    shown.add_row("hindsight, constant for a period", "", "", f"{figures['clairvoyant_gpus']:.2f}", "1.00x", "")
    console.print(shown)
    laws = ", ".join(f"{name} {count}" for name, count in figures["laws"].items() if count)
    common = found.series.common
    shared = f"spread {common[0]:g}, {common[1]:g} of it kept from window to window" if common else "none seen"
    console.print(f"\nLaws of arrival: {laws}. Common factor of all rates: {shared}.", style="dim")
    if report is not None:
        console.print(f"The page is {report / 'index.html'}")
