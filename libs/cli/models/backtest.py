"""The commands `fulcrum models backtest` and `generate`, which evaluate reservations on a usage log."""

import csv
import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.lab.runs import kinds_json, noting, print_kinds, rounded
from libs.cli.page import html_page, make_folder
from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.models.backtest import Backtest, BacktestSettings, backtest
from libs.lab.models.generate import KINDS, generate_usage
from libs.lab.models.usage import Floats, UsageLog, read_usage, use_by_window, write_usage

WIDTH, HEIGHT, LEFT = 1000, 300, 40
# Points of a line. A longer line shows the largest value of each stretch of windows.
MOST_POINTS: Final = 1200
COLORS: Final = {"needed": "#8a94a6", "reserved": "#2a9fbc", "in hindsight": "#d9a514"}


def write_report(folder: Path, found: Backtest, figures: dict[str, Any]) -> None:
    """Write index.html, backtest.json and windows.csv. Raise InvalidRequest."""
    try:
        (folder / "backtest.json").write_text(json.dumps(figures, indent=1) + "\n")
        (folder / "index.html").write_text(_page(found))
        with (folder / "windows.csv").open("w", newline="") as file:
            _write_windows(csv.writer(file, lineterminator="\n"), found)
    except OSError as error:
        raise InvalidRequest(f"cannot write a report to {folder}: {error.strerror}") from None


def _write_windows(rows: Any, found: Backtest) -> None:
    rows.writerow(["start_s", "peak_gpus", "reserved_gpus", "p50_gpus", "clairvoyant_gpus", "active", "expected"])
    series, use = found.series, found.use
    for place, window in enumerate(range(found.warmup, found.done)):
        rows.writerow(
            [
                f"{window * use.window_s:g}",
                f"{use.peak_gpus[window]:g}",
                f"{series.reserved_gpus[window]:g}",
                f"{series.p50_gpus[window]:g}",
                f"{found.hindsight_gpus[place]:g}",
                f"{use.mean_models[window]:.4f}",
                f"{series.expected_models[window]:.4f}",
            ]
        )


def _page(found: Backtest) -> str:
    settings = found.settings
    rows = "".join(
        f"<tr{' class=best' if not place else ''}><td>{escape(each.policy)}</td><td>{each.coverage:.2%}</td>"
        f"<td>{each.interval[0]:.2%} to {each.interval[1]:.2%}</td><td>{each.reserved_gpus:.2f}</td>"
        f"<td>{each.cost:.2f}x</td></tr>"
        for place, each in enumerate(found.scores)
    )
    notes = "".join(f'<p class="dim">{escape(note)}</p>' for note in found.log.notes)
    return html_page(
        f"Reservations for {found.log.name}",
        f"""<h1>Reservations for {escape(found.log.name)}</h1>
<p>{len(found.log.t_s):,} requests to {len(found.log.models):,} models; windows of {settings.window_s:g} s, planning
periods of {settings.period_s:g} s, confidence {settings.confidence:.1%}.</p>{notes}
{_plot(found)}
<div class="scroll"><table><tr><th>policy</th><th>windows covered</th><th>95 % interval</th><th>GPUs</th>
<th>of hindsight's</th></tr>{rows}</table></div>""",
    )


def _plot(found: Backtest) -> str:
    scored = slice(found.warmup, found.done)
    lines = {
        "needed": found.use.peak_gpus[scored].astype(np.float64),
        "reserved": np.array(found.series.reserved_gpus[scored], dtype=np.float64),
        "in hindsight": found.hindsight_gpus,
    }
    top = max(float(each.max(initial=1.0)) for each in lines.values()) * 1.05
    drawn, legend = [], []
    for place, (name, values) in enumerate(lines.items()):
        drawn.append(f'<path d="{_path(_thinned(values), top)}" fill="none" stroke="{COLORS[name]}"/>')
        at = LEFT + 130 * place
        legend.append(f'<rect x="{at}" y="4" width="10" height="10" fill="{COLORS[name]}"/>')
        legend.append(f'<text x="{at + 14}" y="13">{name}</text>')
    marks = "".join(
        f'<text x="{LEFT - 6}" y="{_y(value, top) + 4:.0f}" text-anchor="end">{value:.0f}</text>'
        for value in (0.0, top / 2, top)
    )
    hours = (found.done - found.warmup) * found.use.window_s / 3600
    end = f'<text x="{WIDTH}" y="{HEIGHT - 2}" text-anchor="end">{hours:.1f} h scored</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="GPUs over time">{"".join(drawn)}'
        f"{''.join(legend)}{marks}{end}</svg>"
    )


def _thinned(values: Floats) -> Floats:
    each = -(-len(values) // MOST_POINTS)
    padded = np.pad(values, (0, -len(values) % each), mode="edge")
    return np.asarray(padded.reshape(-1, each).max(axis=1))


def _path(values: Floats, top: float) -> str:
    step = (WIDTH - LEFT) / max(len(values), 1)
    return "M" + "L".join(
        f"{LEFT + place * step:.1f} {_y(value, top):.1f}" for place, value in enumerate(values.tolist())
    )


def _y(value: float, top: float) -> float:
    return 24 + (HEIGHT - 44) * (1 - value / top)


_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
LEAST_S, MOST_S = 0.01, 7 * 86_400.0


def seconds_of(text: str, name: str) -> float:
    """Return the seconds of `500ms`, `60s`, `5m`, `1h`, `1d`. Raise InvalidRequest."""
    found = _TIME.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not LEAST_S <= seconds <= MOST_S:
        raise InvalidRequest(f"--{name} is {quoted(text)}: it must be a time such as 500ms, 60s, 5m, 1h, 7d at most")
    return seconds


def run_backtest(
    file: Path, *, window: str, confidence: float, period: str, report: Path | None, as_json: bool
) -> None:
    """Run the backtest, print it, and write the report if a folder is given. Raise InvalidRequest."""
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


MINUTE_S = 60.0


def run_generate(spec: str | None, *, seed: int, out: Path | None, as_json: bool) -> None:
    """Write a generated log and print its contents, or list the kinds of logs. Raise InvalidRequest."""
    if spec is None:
        _list(as_json=as_json)
        return
    with noting() as notes:
        notes.doing(f"drawing {spec}")
        log = generate_usage(spec, seed=seed)
        if out is not None:
            notes.doing(f"writing {len(log.t_s):,} requests")
            write_usage(log, out)
        found = {"spec": spec, "seed": seed, "file": str(out) if out else None, **rounded(figures(log))}
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if value is not None:
            make_console().print(Text.assemble((name.replace("_", " "), "bold"), f"  {value}"))


def figures(log: UsageLog) -> dict[str, Any]:
    """Return a log's size, the number of models in use, and how correlated they are."""
    use = use_by_window(log, MINUTE_S)
    return {
        "requests": len(log.t_s),
        "models": len(log.models),
        "seconds": log.end_s,
        "exec_mean_s": float(log.exec_s.mean()),
        "gpus_total": float(log.gpus.sum()),
        "active_mean": float(use.mean_models.mean()) if len(use) else None,
        "peak_mean_gpus": float(use.peak_gpus.mean()) if len(use) else None,
        "pairwise_correlation": pairwise_correlation(log),
    }


def pairwise_correlation(log: UsageLog) -> float | None:
    """Return the mean correlation of requests per minute over pairs of models."""
    minutes, models = int(log.end_s / MINUTE_S), len(log.models)
    if minutes < 2 or models < 2:
        return None
    counts = np.zeros((minutes, models))
    inside = log.t_s < minutes * MINUTE_S
    np.add.at(counts, ((log.t_s[inside] / MINUTE_S).astype(np.int64), log.model[inside]), 1.0)
    counts = counts[:, counts.std(axis=0) > 0]
    if counts.shape[1] < 2:
        return None
    scaled = (counts - counts.mean(axis=0)) / counts.std(axis=0)
    total = float((scaled.sum(axis=1) ** 2).mean())
    return (total / counts.shape[1] - 1) / (counts.shape[1] - 1)


def _list(*, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"kinds": kinds_json(KINDS)}))
        return
    console = make_console()
    console.print(Text.assemble(("Kinds", "bold"), ", e.g. gamma:models=100,cv=4,seconds=86400:"))
    print_kinds(console, KINDS)
