"""The report of `fulcrum forecast backtest`: a self-contained HTML page."""

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from libs.cli.report.page import draw_svg, html_page
from libs.forecast.backtest import BacktestForecasts
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, SeriesName

OURS, THEIRS, CAME = "#0b6e4f", "#94a3b8", "#334155"
BANDS: Final = ((0.05, 0.95, 0.15), (0.1, 0.9, 0.2), (0.25, 0.75, 0.3))
"""The lower quantile, upper quantile and opacity of each drawn band."""
UNITS: Final = {"requests": "requests/s", "prefill": "prompt tokens/s", "decode": "output tokens/s"}

Tested = Sequence[tuple[str, BacktestForecasts, list[dict[str, Any]]]]


def spell(seconds: float) -> str:
    """Return a length of time as "10 min" or "3 h"."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def write_page(path: Path, tested: Tested) -> None:
    """Write a table and plots for each file. Raises InvalidRequest without matplotlib."""
    parts = [_part(name, found, records) for name, found, records in tested]
    path.write_text(
        html_page(
            "Forecasts against what came",
            f"""<h1>Forecasts against what came</h1>
<p class="dim">Each forecast is made from earlier bins alone; models are fitted anew each day. Bands hold 50, 80
and 90 % by their own account. The best baseline is the one with the least WAPE on the training
days.</p>{"".join(parts)}""",
        ),
        encoding="utf-8",
    )


def _part(name: str, found: BacktestForecasts, records: Sequence[dict[str, Any]]) -> str:
    plots = [f"<h2>WAPE, ours and the best baseline's</h2>{draw_svg(lambda axes: _wapes(axes, records))}"]
    plots.append(f"<h2>How often the 90 % band held</h2>{draw_svg(lambda axes: _coverage(axes, records))}")
    wanted = sorted({0, min(1, len(found.plan.horizons) - 1), len(found.plan.horizons) - 1})
    for series in SERIES:
        for place in wanted:
            ahead = spell(found.plan.horizons[place] * found.history.step_s)
            plots.append(f"<h2>{series}, predicted {ahead} before</h2>{draw_svg(partial(_fan, found, series, place))}")
    notes = "".join(f'<p class="dim">{escape(note)}</p>' for note in found.history.notes)
    return f'<h1>{escape(name)}</h1>{notes}<div class="scroll">{_table(records)}</div>{"".join(plots)}'


def _table(records: Sequence[dict[str, Any]]) -> str:
    titles = ("series", "ahead", "WAPE", "MASE", "pinball", "WIS", "90 % band holds", "best baseline", "its WAPE")
    rows = []
    for each in records:
        cells = [
            each["series"], spell(each["horizon_s"]), _figure(each["wape"]), _figure(each["mase"]),
            _figure(each["pinball"]), _figure(each["wis"]),
            f"{each['coverage90']:.1%} ± {1.96 * (each['coverage90_error'] or 0):.1%}", each["best_baseline"] or "–",
            _figure(each["best_baseline_wape"]),
        ]  # fmt: skip
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _fan(found: BacktestForecasts, series: SeriesName, place: int, axes: Any) -> None:
    history, horizon = found.history, found.plan.horizons[place]
    came = np.arange(found.plan.test_from, len(history))
    said = found.ours[series][came - horizon, place]
    made = np.isfinite(said[:, 0])
    days = came * history.step_s / 86_400
    for lower, upper, dark in BANDS:
        axes.fill_between(days[made], said[made, LEVELS.index(lower)], said[made, LEVELS.index(upper)], color=OURS,
                          alpha=dark, linewidth=0, label=f"{upper - lower:.0%}")  # fmt: skip
    axes.plot(days[made], said[made, LEVELS.index(0.5)], color=OURS, linewidth=1, label="median")
    axes.plot(days, history.series(series)[came], color=CAME, linewidth=0.8, label="came")
    axes.set(xlabel="day", ylabel=UNITS[series], ylim=(0, None))
    axes.legend(loc="upper left", ncols=5, fontsize=8)


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{each['series']}\n{spell(each['horizon_s'])}" for each in records]


def _wapes(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    places = np.arange(len(records))
    axes.bar(places - 0.2, [100 * (each["wape"] or 0) for each in records], 0.4, color=OURS, label="ours")
    axes.bar(places + 0.2, [100 * (each["best_baseline_wape"] or 0) for each in records], 0.4, color=THEIRS,
             label="best baseline")  # fmt: skip
    axes.set_xticks(places, _names(records), fontsize=7)
    axes.set_ylabel("WAPE, %")
    axes.legend(loc="upper left")


def _coverage(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    places = np.arange(len(records))
    axes.errorbar(places, [100 * each["coverage90"] for each in records],
                  yerr=[196 * (each["coverage90_error"] or 0) for each in records], fmt="o", color=OURS,
                  label="of all bins, with 95 % of its block-bootstrap error")  # fmt: skip
    for key, mark, words in (
        ("coverage90_by_hour", "_", "by hours of the day"),
        ("coverage90_by_level", "x", "by level"),
    ):
        dots = [(place, 100 * part["coverage90"]) for place, each in enumerate(records) for part in each[key]]
        axes.plot([at for at, _ in dots], [value for _, value in dots], mark, color=THEIRS, label=words)
    axes.axhline(90, color="#888", linewidth=0.8, linestyle="--")
    axes.set_xticks(places, _names(records), fontsize=7)
    axes.set_ylabel("% in the band")
    axes.legend(loc="lower left", fontsize=8)
