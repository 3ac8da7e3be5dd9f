"""Snapshots for pipes: JSON a line, or one table."""

import json
import time
from typing import Any, Final

from libs.cli.find import get_json
from libs.cli.tables import show_occupancy_of

PERIOD_S: Final = 1.0
WINDOW: Final = "2s"


def print_snapshots(url: str, *, as_json: bool, once: bool) -> None:
    """One, or one a second until interrupted. Raises StartupError when the service does not answer."""
    while True:
        snapshot = take(url)
        if as_json:
            print(json.dumps(snapshot), flush=True)
        else:
            show_occupancy_of(snapshot["occupancy"])
            for alert in snapshot["alerts"]:
                print(f"{alert['severity']}: {alert['name']}: {alert['reason']}")
        if once:
            return
        time.sleep(PERIOD_S)


def take(url: str) -> dict[str, Any]:
    """Occupancy, what requests met, and alerts that fire, as of now."""
    occupancy = get_json(url, "/v1/occupancy", window=WINDOW)
    return {
        "unix_ms": occupancy["as_of_unix_ns"] // 1_000_000,
        "age_ms": occupancy["age_ms"],
        "ratio": occupancy["ratio"],
        "occupancy": occupancy,
        "requests": get_json(url, "/v1/requests/summary", window="1m")["total"],
        "alerts": get_json(url, "/v1/alerts", limit="0")["firing"],
    }
