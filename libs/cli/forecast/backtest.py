"""The commands `fulcrum forecast backtest` and `explain`: forecasts compared with actual demand, and the candidates
behind them.
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from html import escape
from math import exp, isfinite, isnan, log
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from libs.cli.console import make_console, plain_table
from libs.cli.find import FORECAST_TIMEOUT_S, find_suite, get_json
from libs.cli.forecast.live import UNIX_S, clock_time
from libs.cli.lab.runs import ProgressNotes, noting
from libs.cli.page import check_plots, draw_svg, html_page, make_folder
from libs.cli.top.draw import sparkline
from libs.contracts.errors import InvalidRequest
from libs.demand.report import make_outlook
from libs.forecast.backtest import BacktestForecasts, BacktestPlan, make_plan, run, score
from libs.forecast.baselines import Baseline, heavy_baselines, heavy_names, light_baselines
from libs.forecast.demand_file import read_demand
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, SeriesName
from libs.policy.forecast.model import DemandForecaster

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
    """Write a table and plots for each file. Raise InvalidRequest without matplotlib."""
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
    return f'<h1>{escape(name)}</h1>{notes}<div class="scroll">{_page_table(records)}</div>{"".join(plots)}'


def _page_table(records: Sequence[dict[str, Any]]) -> str:
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


_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MOST_HORIZONS: Final = 16
PICTURE_COLUMNS: Final = 96


def backtest_all(
    files: Sequence[Path],
    baselines: str,
    horizons: str,
    *,
    test_s: float,
    every: int,
    report: Path | None,
    as_json: bool,
) -> None:
    """Print one record for each file, series and horizon. Raise InvalidRequest."""
    horizons_s = parse_horizons(horizons)
    rivals = chosen_baselines(baselines)
    if report is not None:
        check_plots()
        make_folder(report)
    tested: list[tuple[str, BacktestForecasts, list[dict[str, Any]]]] = []
    with noting() as notes:
        planned = [(path, *_plan(path, horizons_s, test_s)) for path in files]  # read every file before running any
        for path, history, plan in planned:
            _say(notes, path, history, plan, horizons_s)
            name = path.stem if len({each.stem for each in files}) == len(files) else str(path)
            doing = partial(_doing, notes, name)
            found = run(history, plan, DemandForecaster(), rivals, every=every, note=doing)
            tested.append((name, found, [{"file": name, **_clean(each)} for each in score(found)]))
    records = [record for _, _, found in tested for record in found]
    if report is not None:
        (report / "backtest.json").write_text(json.dumps(records, indent=1) + "\n")
        write_page(report / "index.html", tested)
    if as_json:
        print(json.dumps(records))
        return
    console = make_console()
    for name, found, found_records in tested:
        console.print(f"\n{name}")
        console.print(_printed_table(found_records))
        for line in picture(found):
            console.print(line)
        for line in summary(found_records):
            console.print(line)
    if report is not None:
        console.print(f"\nThe page is {report / 'index.html'}")


def _doing(notes: ProgressNotes, name: str, line: str) -> None:
    notes.doing(f"{name}: {line}")


def parse_horizons(text: str) -> tuple[float, ...]:
    """Return the seconds of horizons such as "10m,1h". Raise InvalidRequest."""
    found = [re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])", each.strip()) for each in text.split(",")]
    seconds = tuple(float(each[1]) * _UNITS[each[2]] for each in found if each)
    if len(seconds) != len(found) or len(seconds) > MOST_HORIZONS or min(seconds) <= 0:
        raise InvalidRequest(f"--horizons {text[:60]!r} must be up to {MOST_HORIZONS} times such as 10m,1h,24h")
    return seconds


def chosen_baselines(text: str) -> list[Baseline]:
    """Return the baselines of the given names, or of "light" or "all".

    Raise InvalidRequest if one is unknown or its library is not installed.
    """
    light = light_baselines()
    if text == "light":
        return light
    if text == "all":
        return light + heavy_baselines(heavy_names())
    names = text.split(",")
    known = {each.name: each for each in light}
    unknown = [name for name in names if name not in known and name not in heavy_names()]
    if unknown:
        raise InvalidRequest(f"no baseline is called {unknown[0]!r}; known are {', '.join([*known, *heavy_names()])}")
    return [known[name] for name in names if name in known] + heavy_baselines([n for n in names if n not in known])


def _plan(path: Path, horizons_s: Sequence[float], test_s: float) -> tuple[DemandHistory, BacktestPlan]:
    history = read_demand(path)
    try:
        return history, make_plan(history, horizons_s, test_s)
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from None


def _say(
    notes: ProgressNotes, path: Path, history: DemandHistory, plan: BacktestPlan, horizons_s: Sequence[float]
) -> None:
    days = len(history) * history.step_s / 86_400
    scored = (len(history) - plan.test_from) * history.step_s / 86_400
    notes.done(
        f"{path.name}: {len(history)} bins of {history.step_s:g} s, {days:.1f} days, the last {scored:.1f} scored"
    )
    for note in history.notes:
        notes.done(f"{path.name}: {note}")
    for horizon_s in horizons_s:
        if round(horizon_s / history.step_s) not in plan.horizons:
            notes.done(
                f"{path.name}: {spell(horizon_s)} ahead is left out: shorter than a bin, or longer than the file bears"
            )
    if days < 2:
        notes.done(f"{path.name}: little history: no daily season can be learned, bands are wide")


def _clean(value: Any) -> Any:
    """Round to six digits and replace non-finite numbers by None, because JSON has no nan."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(each) for key, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list) else value


def _printed_table(records: Sequence[dict[str, Any]]) -> Table:
    titles = ("ahead", "WAPE", "MASE", "WIS", "90 % band holds", "best baseline", "its WAPE", "ratio", "in hindsight")
    table = plain_table("series", *titles, left=("series",))
    for each in records:
        best = each["baselines"].get(each["best_baseline"], {})
        hindsight = each["best_in_hindsight"]
        least = each["baselines"].get(hindsight, {}).get("wape")
        table.add_row(
            each["series"], spell(each["horizon_s"]), _percent(each["wape"]), _shown(each["mase"]),
            f"{each['wis']:.4g}", f"{each['coverage90']:.0%} ± {1.96 * (each['coverage90_error'] or 0):.0%}",
            each["best_baseline"] or "–", _percent(best.get("wape")), _shown(ratio(each["wape"], best.get("wape"))),
            f"{hindsight or '–'} {_shown(ratio(each['wape'], least))}",
        )  # fmt: skip
    return table


def picture(found: BacktestForecasts) -> list[str]:
    """Return bars of the scored requests and of their forecast an hour before, with * where the 90 % band missed."""
    history, plan = found.history, found.plan
    place = min(range(len(plan.horizons)), key=lambda at: abs(plan.horizons[at] * history.step_s - 3600))
    came = history.requests[plan.test_from :]
    origins = np.arange(plan.test_from, len(history)) - plan.horizons[place]
    said = found.ours["requests"][origins, place]
    groups = np.array_split(np.arange(len(came)), min(PICTURE_COLUMNS, len(came)))
    outside = (came < said[:, 0]) | (came > said[:, -1])
    rows = [np.array([_mean(row[group]) for group in groups]) for row in (came, said[:, LEVELS.index(0.5)])]
    most = max([float(np.nanmax(row)) for row in rows if np.isfinite(row).any()], default=0.0)
    if most <= 0:
        return []
    ahead = spell(plan.horizons[place] * history.step_s)
    bars = [sparkline([None if isnan(value) else value for value in row.tolist()], most) for row in rows]
    missed = "".join("*" if outside[group].any() else " " for group in groups)
    titles = ("requests that came", f"predicted {ahead} before", "outside of 90 %")
    return [f"{title:24}{row}" for title, row in zip(titles, (*bars, missed), strict=True)]


def _mean(values: Floats) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return the quotient, or None if either value is missing or the divisor is 0."""
    return ours / theirs if ours is not None and theirs else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences with the geometric means over series and horizons."""
    lines = []
    for title, some in (
        ("under 1 h ahead", [each for each in records if each["horizon_s"] < 3600]),
        ("1 h and more", [each for each in records if each["horizon_s"] >= 3600]),
    ):
        chosen = mean_ratio(ratio(each["wape"], each["best_baseline_wape"]) for each in some)
        names = sorted({name for each in some for name in each["baselines"]})
        wapes = {n: mean_ratio(ratio(e["wape"], e["baselines"].get(n, {}).get("wape")) for e in some) for n in names}
        scores = {n: mean_ratio(ratio(e["wis"], e["baselines"].get(n, {}).get("wis")) for e in some) for n in names}
        if chosen is not None:
            least = mean_ratio(ratio(each["wape"], _least_wape(each)) for each in some)
            lines.append(
                f"{title}: WAPE is {chosen:.3f} times that of the best baseline, chosen on the training days, "
                f"{_shown(least)} times that of the best in hindsight"
            )
            each_one = [f"{name} {_shown(wapes[name])} and {_shown(scores[name])}" for name in names]
            lines.append(f"  WAPE and WIS as multiples of each one's: {', '.join(each_one)}")
    return lines


def _least_wape(record: dict[str, Any]) -> float | None:
    best: float | None = record["baselines"].get(record["best_in_hindsight"], {}).get("wape")
    return best


def mean_ratio(ratios: Any) -> float | None:
    """Return the geometric mean of the ratios that exist and are above 0."""
    found = [log(each) for each in ratios if each]
    return exp(sum(found) / len(found)) if found else None


MOST_CANDIDATES: Final = 4


def show_explanation(ready_file: Path | None, file: Path | None, model: str, horizon: str, *, as_json: bool) -> None:
    """Print candidates, weights and errors. Raise StartupError without a suite, InvalidRequest for a bad file."""
    if file is None:
        found: dict[str, Any] = get_json(
            find_suite(ready_file).metrics, "/v1/forecast", FORECAST_TIMEOUT_S, model=model, horizon=horizon
        )
        rows, notes, title = found["carried"], found["notes"], found["model"]
    else:
        rows, notes = explain_file(file, horizon)
        title = file.name
    if as_json:
        print(json.dumps(rows))
        return
    console = make_console()
    console.print(title)
    if rows:
        table = plain_table(
            "series", "ahead", "carried by", "since", "mean error", left=("series", "carried by", "since")
        )
        for row in rows:
            named = list(row["weights"].items())[:MOST_CANDIDATES]
            errors = [row["errors"].get(name) for name, _ in named]
            table.add_row(
                row["series"], spell(round(row["horizon_s"])),
                ", ".join(f"{name} {weight:.0%}" for name, weight in named), _moment(row["since_unix_s"]),
                ", ".join("–" if error is None else f"{error:.3g}" for error in errors),
            )  # fmt: skip
        console.print(table)
    for note in notes:
        console.print(f"[dim]{note}[/]")


def explain_file(file: Path, horizon: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (rows in the form of `/v1/forecast`, notes). Raise InvalidRequest."""
    (horizon_s,) = parse_horizons(horizon)[:1]
    history = read_demand(file)
    try:
        outlook = make_outlook(history, horizon_s)
    except ValueError as error:
        raise InvalidRequest(f"{file}: {error}") from None
    rows = [
        {
            "series": name,
            "horizon_s": each.horizon * outlook.step_s,
            "since_unix_s": each.since_s,
            "weights": each.weights,
            "errors": {candidate: None if isnan(error) else error for candidate, error in each.errors.items()},
        }
        for name in SERIES
        for each in outlook.carried[name]
    ]
    return rows, list(outlook.notes)


def _moment(at_s: float) -> str:
    return clock_time(at_s) if at_s >= UNIX_S else f"day {at_s / 86_400:.2f}"
