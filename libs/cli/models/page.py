"""The report of `fulcrum models backtest`: a self-contained page, its figures, and every window."""

import csv
import json
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from libs.cli.report.page import html_page
from libs.contracts.errors import InvalidRequest
from libs.lab.models.backtest import Backtest
from libs.lab.models.usage import Floats

WIDTH, HEIGHT, LEFT = 1000, 300, 40
# Points of a line. A longer one shows the largest value of each stretch of windows.
MOST_POINTS: Final = 1200
COLORS: Final = {"needed": "#8a94a6", "reserved": "#2a9fbc", "in hindsight": "#d9a514"}


def write_report(folder: Path, found: Backtest, figures: dict[str, Any]) -> None:
    """Write index.html, backtest.json and windows.csv. Raises InvalidRequest."""
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
