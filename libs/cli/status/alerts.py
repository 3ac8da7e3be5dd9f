"""The command `fulcrum alerts`: firing alerts, and with `--all` those that are over."""

import json
import time
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.cli.status.gauge import span

# Changes that `--all` shows.
RECENT: Final = 50
STYLES: Final = {"critical": "bold red", "warning": "yellow"}


def show_alerts(ready_file: Path | None, *, over: bool, as_json: bool) -> None:
    """Print the alerts, the worst first. Raises StartupError if there is no suite."""
    found: dict[str, Any] = get_json(
        find_suite(ready_file).metrics, "/v1/alerts", exact=as_json, limit=str(RECENT if over else 0)
    )
    if as_json:
        print(json.dumps(found))
        return
    console, now_ms = make_console(), time.time_ns() // 1_000_000
    if not found["firing"]:
        console.print("No alert fires.", style="green")
    silences: list[dict[str, Any]] = found.get("silences", [])  # a service of before has none
    silent = {alert: each for each in silences if not each["alert_id"] for alert in each["alerts"]}
    seen = {each["alert_id"]: each for each in silences if each["alert_id"]}
    for alert in sorted(found["firing"], key=lambda each: (each["id"] in silent, each["severity"] != "critical")):
        console.print(alert_line(alert, now_ms, silent=alert["id"] in silent), soft_wrap=True)
        if alert.get("command"):  # a service of before says none
            console.print(Text.assemble("    run: ", (alert["command"], "bold")), soft_wrap=True)
        for each in (silent.get(alert["id"]), seen.get(alert["id"])):
            if each is not None:
                console.print(Text(f"    {silence_line(each, now_ms)}", "cyan"), soft_wrap=True)
        console.print(Text(f"    what to do: {alert['runbook_url']}", "dim"), soft_wrap=True)
    for each in silences:
        if not each["alerts"] and not each["alert_id"]:
            console.print(Text(f"{about(each)} {silence_line(each, now_ms)}", "dim"), soft_wrap=True)
    for name in found["held_back"]:
        console.print(Text(f"{name} is not judged now: the telemetry that it stands on is old.", "yellow"))
    for alert in found["recent"]:
        if alert["state"] != "firing":
            console.print(alert_line(alert, now_ms), soft_wrap=True)


def about(silence: dict[str, Any]) -> str:
    """Return what a silence covers, such as "FulcrumWorkerStuck worker=gpu-3"."""
    labels = " ".join(f"{name}={value}" for name, value in silence["labels"].items())
    return " ".join(filter(None, (silence["alert_name"], labels))) or silence["alert_id"]


def silence_line(silence: dict[str, Any], now_ms: int) -> str:
    """Return a silence's remaining time, author, reason and id."""
    why = f": {silence['reason']}" if silence["reason"] else ""
    if silence["alert_id"]:
        return f"looked after by {silence['actor']} for {span(now_ms - silence['made_unix_ms'])}{why} ({silence['id']})"
    left = span(silence["until_unix_ms"] - now_ms)
    return f"silent for {left} more, by {silence['actor']}{why} ({silence['id']})"


def _reason(alert: dict[str, Any]) -> str:
    """Return the present reason of an alert, and say so if its condition is gone but the alert is not yet over."""
    now = str(alert.get("now") or alert["reason"])  # a service of before says neither
    return f"clearing: {now}; when it fired: {alert['reason']}" if alert.get("clearing") else now


def alert_line(alert: dict[str, Any], now_ms: int, *, silent: bool = False) -> Text:
    """Return an alert's name, labels, age and reason."""
    over = alert["ended_unix_ms"] is not None
    style = "dim" if over or silent else STYLES.get(alert["severity"], "")
    subject = " ".join(alert["labels"].values())
    when = (
        f"ended {span(now_ms - alert['ended_unix_ms'])} ago"
        if over
        else f"for {span(now_ms - alert['started_unix_ms'])}"
    )
    return Text.assemble(
        ("✓ " if over else "△ " if silent else "▲ ", style),
        (alert["name"], style),
        f" {subject} " if subject else " ",
        (f"({when}): ", "dim"),
        alert["ended_because"] or _reason(alert),
    )
