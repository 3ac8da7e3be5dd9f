"""The output of `fulcrum top`: the screen, or snapshots for pipes, which start without rich and textual."""

import sys
import time
from json import dumps
from pathlib import Path
from typing import Any, Final

from libs.cli.find import find_suite, get_json
from libs.contracts.errors import StartupError

PERIOD_S: Final = 1.0
WINDOW: Final = "2s"


def show_top(ready: Path | None, *, metrics: str | None, once: bool, light: bool, as_json: bool) -> None:
    """Run until the user leaves, or print one snapshot. Raise StartupError."""
    url = metrics.rstrip("/") if metrics else find_suite(ready).metrics
    if as_json or once:
        _print_snapshots(url, as_json=as_json, once=once)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise StartupError("the screen needs a terminal: use `fulcrum top --once` or `fulcrum top --json` here")
    from libs.cli.top.screen import run_screen  # noqa: PLC0415 (what only the screen needs)

    run_screen(url, light=light)


def _print_snapshots(url: str, *, as_json: bool, once: bool) -> None:
    """Print one snapshot, or one a second until interrupted. Raise StartupError if the service does not answer."""
    from libs.cli.status.tables import show_occupancy_of  # noqa: PLC0415

    while True:
        snapshot = _take(url, exact=as_json)
        if as_json:
            print(dumps(snapshot), flush=True)
        else:
            show_occupancy_of(snapshot["occupancy"])
            for alert in snapshot["alerts"]:
                print(f"{alert['severity']}: {alert['name']}: {alert['reason']}")
        if once:
            return
        time.sleep(PERIOD_S)


def _take(url: str, *, exact: bool) -> dict[str, Any]:
    """Return occupancy, request latencies and firing alerts as of now."""
    occupancy = get_json(url, "/v1/occupancy", exact=exact, window=WINDOW)
    return {
        "unix_ms": occupancy["as_of_unix_ns"] // 1_000_000,
        "age_ms": occupancy["age_ms"],
        "ratio": occupancy["ratio"],
        "occupancy": occupancy,
        "requests": get_json(url, "/v1/requests/summary", exact=exact, window="1m")["total"],
        "alerts": get_json(url, "/v1/alerts", exact=exact, limit="0")["firing"],
    }
