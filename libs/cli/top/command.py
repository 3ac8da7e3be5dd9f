"""`fulcrum top`: the cluster in a terminal."""

import time
from json import dumps
from typing import Annotated, Any, Final

import typer

from libs.cli.options import ReadyFile

EPILOG = "Example: fulcrum top --metrics http://HOST:8002, or for pipes: fulcrum top --json | jq .ratio"
PERIOD_S: Final = 1.0
WINDOW: Final = "2s"


def top(
    metrics: Annotated[
        str | None, typer.Option(metavar="URL", help="Metrics service to look at; else that of the running suite.")
    ] = None,
    ready: ReadyFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print a snapshot a second, one JSON object a line.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    light: Annotated[bool, typer.Option("--light", help="For a light terminal.")] = False,
) -> None:
    """Watch prefill and decode live: ratio, pools, workers, alerts. Keys are in the footer."""
    from libs.cli.find import find_suite  # noqa: PLC0415 (what only this command needs)

    url = metrics.rstrip("/") if metrics else find_suite(ready).metrics
    if json or once:
        _print_snapshots(url, as_json=json, once=once)
        return
    from libs.cli.top.screen import run_screen  # noqa: PLC0415

    run_screen(url, light=light)


def _print_snapshots(url: str, *, as_json: bool, once: bool) -> None:
    """One, or one a second until interrupted. Raises StartupError when the service does not answer."""
    from libs.cli.tables import show_occupancy_of  # noqa: PLC0415

    while True:
        snapshot = _take(url)
        if as_json:
            print(dumps(snapshot), flush=True)
        else:
            show_occupancy_of(snapshot["occupancy"])
            for alert in snapshot["alerts"]:
                print(f"{alert['severity']}: {alert['name']}: {alert['reason']}")
        if once:
            return
        time.sleep(PERIOD_S)


def _take(url: str) -> dict[str, Any]:
    """Occupancy, what requests met, and alerts that fire, as of now."""
    from libs.cli.find import get_json  # noqa: PLC0415

    occupancy = get_json(url, "/v1/occupancy", window=WINDOW)
    return {
        "unix_ms": occupancy["as_of_unix_ns"] // 1_000_000,
        "age_ms": occupancy["age_ms"],
        "ratio": occupancy["ratio"],
        "occupancy": occupancy,
        "requests": get_json(url, "/v1/requests/summary", window="1m")["total"],
        "alerts": get_json(url, "/v1/alerts", limit="0")["firing"],
    }
