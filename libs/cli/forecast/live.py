"""The command `fulcrum forecast`: a running suite's expected demand."""

import json
import time
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import FORECAST_TIMEOUT_S, find_suite, get_json

MOST_ROWS: Final = 12
WEEK_S: Final = 6 * 86_400.0
# Times of a file from here on are Unix seconds; earlier ones count from the file's beginning.
UNIX_S: Final = 1e9
NOT_PREDICTED: Final = "nothing is predicted"
UNITS: Final = {"requests": "requests/s", "prefill": "prefill", "decode": "decode"}


def show_forecast(ready_file: Path | None, model: str, horizon: str, by: str, *, as_json: bool) -> None:
    """Print the metrics service's forecast. Raise StartupError if there is no suite or it refuses."""
    suite = find_suite(ready_file)
    query = {"model": model, "horizon": horizon, **({"by": by} if by else {})}
    found: dict[str, Any] = get_json(suite.metrics, "/v1/forecast", FORECAST_TIMEOUT_S, exact=as_json, **query)
    if as_json:
        print(json.dumps(found))
        return
    console = make_console()
    if _is_unknown(found):
        console.print("No demand is known yet: ask again after some requests, or `fulcrum forecast import` some.")
        return
    console.print(f"{found['model']}, from {clock_time(found['starts_unix_s'][0])}")
    console.print(_table(found))
    if "parts" in found:
        console.print(f"Medians over {horizon}, each second:")
        console.print(_parts(found["parts"]))
    for note in found["notes"]:
        console.print(note, style="yellow" if "little history" in note else "dim")
    for line in map(trend_in_words, found["trend"]):
        console.print(line)
    if not found["trend"]:
        console.print("No change of level or balance was found.")


def _is_unknown(found: dict[str, Any]) -> bool:
    """Return whether the forecast is empty because nothing has been counted, as opposed to a forecast of no demand."""
    return any(NOT_PREDICTED in note for note in found["notes"]) and not any(found["series"]["requests"]["p95"])


def _table(found: dict[str, Any]) -> Table:
    busy = "gpus" in found["series"]["prefill"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("from", no_wrap=True)
    table.add_column("requests/s, 90 % band", justify="right", no_wrap=True)
    for phase in ("prefill", "decode"):
        table.add_column(
            f"{phase} {'GPUs busy' if busy else 'tokens/s'}, 50 %, 90 % band", justify="right", no_wrap=True
        )
    starts = found["starts_unix_s"]
    every = max(-(-len(starts) // MOST_ROWS), 1)
    for at in range(every - 1, len(starts), every):
        cells = [clock_time(starts[at])]
        rates = found["series"]["requests"]
        cells.append(f"{_short(rates['p50'][at])}   ({_short(rates['p5'][at])} – {_short(rates['p95'][at])})")
        for phase in ("prefill", "decode"):
            bands = found["series"][phase]
            bands = bands["gpus"] if busy else bands
            near = f"{_short(bands['p25'][at])} – {_short(bands['p75'][at])}"
            cells.append(
                f"{_short(bands['p50'][at])}   {near}   ({_short(bands['p5'][at])} – {_short(bands['p95'][at])})"
            )
        table.add_row(*cells)
    return table


def _parts(parts: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(parts["by"], no_wrap=True)
    for title in ("requests", "prefill tokens", "decode tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, series in (*parts["each"].items(), ("all", parts["total"])):
        means = [sum(series[each]) / max(len(series[each]), 1) for each in UNITS]
        table.add_row(Text(name), *map(_short, means), style="bold" if series is parts["total"] else "")
    return table


def trend_in_words(trend: dict[str, Any]) -> str:
    """Return a trend as "decode-heavy since Tue 14:00: outputs of acme grew from 240 to 610 tokens; prefill : decode
    0.8 → 0.3".
    """
    before, after = trend["before"], trend["after"]
    ratio = f"{_short(before)} → {_short(after)}"
    if trend["what"] == "balance":
        head, tail = "decode-heavy" if after < before else "prefill-heavy", f"prefill : decode {ratio}"
    else:
        head, tail = f"{'more' if after > before else 'less'} {trend['what']} work", f"GPUs busy {ratio}"
    causes = ", ".join(map(_cause, trend["causes"][:2]))
    return f"{head} since {clock_time(trend['since_unix_s'])}: {causes + '; ' if causes else ''}{tail}"


def _cause(cause: dict[str, Any]) -> str:
    moved = "grew" if cause["after"] > cause["before"] else "fell"
    unit = "a second" if cause["what"] == "requests" else "tokens"
    who = "all tenants" if cause["tenant"] == "default" else cause["tenant"]
    return f"{cause['what']} of {who} {moved} from {_short(cause['before'])} to {_short(cause['after'])} {unit}"


def clock_time(unix_s: float) -> str:
    """Return local time as "Tue 14:00", with seconds if it has any and a date if it is not in this week."""
    local = time.localtime(unix_s)
    day = "%a" if abs(unix_s - time.time()) < WEEK_S else "%a %d %b"
    return time.strftime(f"{day} %H:%M:%S" if local.tm_sec else f"{day} %H:%M", local)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
