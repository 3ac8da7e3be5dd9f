"""What `fulcrum alerts` does: those that fire, and with `--all` those that are over."""

import json
import time
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.cli.status.gauge import span

RECENT: Final = 50
"""Changes that `--all` shows."""
STYLES: Final = {"critical": "bold red", "warning": "yellow"}


def show_alerts(ready_file: Path | None, *, over: bool, as_json: bool) -> None:
    """Print them, the worst first. Raises StartupError when there is no suite."""
    found: dict[str, Any] = get_json(find_suite(ready_file).metrics, "/v1/alerts", limit=str(RECENT if over else 0))
    if as_json:
        print(json.dumps(found))
        return
    console, now_ms = make_console(), time.time_ns() // 1_000_000
    if not found["firing"]:
        console.print("No alert fires.", style="green")
    for alert in sorted(found["firing"], key=lambda each: each["severity"] != "critical"):
        console.print(alert_line(alert, now_ms), soft_wrap=True)
        console.print(Text(f"    what to do: {alert['runbook_url']}", "dim"), soft_wrap=True)
    for name in found["held_back"]:
        console.print(Text(f"{name} is not judged now: the telemetry that it stands on is old.", "yellow"))
    for alert in found["recent"]:
        if alert["state"] != "firing":
            console.print(alert_line(alert, now_ms), soft_wrap=True)


def alert_line(alert: dict[str, Any], now_ms: int) -> Text:
    """Name, what it is about, since when, and why."""
    over = alert["ended_unix_ms"] is not None
    about = " ".join(alert["labels"].values())
    when = (
        f"ended {span(now_ms - alert['ended_unix_ms'])} ago"
        if over
        else f"for {span(now_ms - alert['started_unix_ms'])}"
    )
    return Text.assemble(
        ("✓ " if over else "▲ ", "dim" if over else STYLES.get(alert["severity"], "")),
        (alert["name"], "dim" if over else STYLES.get(alert["severity"], "")),
        f" {about} " if about else " ",
        (f"({when}): ", "dim"),
        alert["ended_because"] or alert["reason"],
    )
