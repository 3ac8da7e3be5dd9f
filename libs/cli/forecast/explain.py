"""The command `fulcrum forecast explain`: the candidates behind each forecast, of a suite or of a file."""

import json
from math import isnan
from pathlib import Path
from typing import Any, Final

from libs.cli.console import make_console, plain_table
from libs.cli.find import find_suite, get_json
from libs.cli.forecast.backtest import parse_horizons
from libs.cli.forecast.live import clock_time
from libs.cli.forecast.page import spell
from libs.contracts.errors import InvalidRequest
from libs.demand.report import make_outlook
from libs.forecast.demand_file import read_demand
from libs.policy.forecast.history import SERIES

MOST_CANDIDATES: Final = 4
# Times from here on are Unix times; earlier ones count from a file's own beginning.
UNIX_S: Final = 1e9


def show_explanation(ready_file: Path | None, file: Path | None, model: str, horizon: str, *, as_json: bool) -> None:
    """Print candidates, weights and errors. Raises StartupError without a suite, InvalidRequest for a bad file."""
    if file is None:
        found: dict[str, Any] = get_json(find_suite(ready_file).metrics, "/v1/forecast", model=model, horizon=horizon)
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
    """Return (rows in the form of `/v1/forecast`, notes). Raises InvalidRequest."""
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
