"""The command `fulcrum forecast backtest`: forecasts compared with what came, as table, JSON and page."""

import json
import re
from collections.abc import Sequence
from functools import partial
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from libs.cli.console import make_console, plain_table
from libs.cli.forecast.page import spell, write_page
from libs.cli.lab.progress import Notes, noting
from libs.cli.report.page import check_plots, make_folder
from libs.contracts.errors import InvalidRequest
from libs.forecast.backtest import BacktestForecasts, BacktestPlan, make_plan, run, score
from libs.forecast.baselines import Baseline, heavy_baselines, heavy_names, light_baselines
from libs.forecast.demand_file import read_demand
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import DemandHistory, Floats
from libs.policy.forecast.model import DemandForecaster

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MOST_HORIZONS: Final = 16
PICTURE_COLUMNS: Final = 96
BARS: Final = "▁▂▃▄▅▆▇█"


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
    """Print one record for each file, series and horizon. Raises InvalidRequest."""
    horizons_s = parse_horizons(horizons)
    rivals = chosen_baselines(baselines)
    if report is not None:
        check_plots()
        make_folder(report)
    tested: list[tuple[str, BacktestForecasts, list[dict[str, Any]]]] = []
    with noting() as notes:
        planned = [(path, *_plan(path, horizons_s, test_s)) for path in files]  # every file is read before any is run
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
        console.print(_table(found_records))
        for line in picture(found):
            console.print(line)
        for line in summary(found_records):
            console.print(line)
    if report is not None:
        console.print(f"\nThe page is {report / 'index.html'}")


def _doing(notes: Notes, name: str, line: str) -> None:
    notes.doing(f"{name}: {line}")


def parse_horizons(text: str) -> tuple[float, ...]:
    """Return the seconds of horizons such as "10m,1h". Raises InvalidRequest."""
    found = [re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])", each.strip()) for each in text.split(",")]
    seconds = tuple(float(each[1]) * _UNITS[each[2]] for each in found if each)
    if len(seconds) != len(found) or len(seconds) > MOST_HORIZONS or min(seconds) <= 0:
        raise InvalidRequest(f"--horizons {text[:60]!r}: up to {MOST_HORIZONS} times such as 10m,1h,24h are needed")
    return seconds


def chosen_baselines(text: str) -> list[Baseline]:
    """Return the baselines of the given names, or of "light" or "all".

    Raises InvalidRequest if one is unknown or its library is not installed.
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


def _say(notes: Notes, path: Path, history: DemandHistory, plan: BacktestPlan, horizons_s: Sequence[float]) -> None:
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


def _table(records: Sequence[dict[str, Any]]) -> Table:
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
    bars = ["".join(_bar(value / most) for value in row.tolist()) for row in rows]
    missed = "".join("*" if outside[group].any() else " " for group in groups)
    titles = ("requests that came", f"predicted {ahead} before", "outside of 90 %")
    return [f"{title:24}{row}" for title, row in zip(titles, (*bars, missed), strict=True)]


def _mean(values: Floats) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _bar(share: float) -> str:
    return " " if share != share else BARS[min(int(share * len(BARS)), len(BARS) - 1)]  # noqa: PLR0124 (nan)


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
