"""The command `fulcrum events`: role moves, decisions, workers that came or died, and alerts in order of time."""

import json
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json

POLL_S: Final = 0.5
# Requested at each poll while following: more than happen between two.
AT_ONCE: Final = 200
# Keys of printed events to remember; far more than one poll can repeat.
MAX_SHOWN: Final = 5_000
STYLES: Final = {
    "role_moved": "green",
    "set_role": "bold cyan",
    "set_budget": "cyan",
    "recommend": "yellow",
    "effect": "dim",
    "set_mode": "magenta",
    "set_limits": "magenta",
    "alert": "bold yellow",
    "alert_over": "dim",
    "worker_lost": "bold red",
    "worker_restarted": "bold red",
}


class EventLine(msgspec.Struct, frozen=True):
    """One line of the list; `worker` and `role` are empty if it concerns none."""

    unix_ms: int
    kind: str
    """The kind as `/v1/events` names it, or alert and alert_over."""
    subject: str
    text: str
    worker: str = ""
    role: str = ""
    actor: str = ""

    @property
    def key(self) -> tuple[int, str, str]:
        """A key that is the same at every poll."""
        return self.unix_ms, self.kind, self.subject


def show_events(ready_file: Path | None, *, limit: int, follow: bool, as_json: bool) -> None:
    """Print the last events, the oldest first, and with `follow` new ones. Raises StartupError."""
    url, console = find_suite(ready_file).metrics, make_console()
    shown: deque[tuple[int, str, str]] = deque(maxlen=MAX_SHOWN)

    def show(happened: Iterable[EventLine]) -> None:
        for each in happened:
            if each.key in shown:
                continue
            shown.append(each.key)
            if as_json:
                print(json.dumps(msgspec.to_builtins(each)), flush=True)  # escapes control characters
            else:
                console.print(line(each), soft_wrap=True)

    first = _ask(url, max(limit, AT_ONCE) if follow else limit, exact=as_json)
    shown.extend(each.key for each in first[:-limit])
    show(first[-limit:])
    if not first and not follow and not as_json:
        console.print("Nothing has happened since the metrics service started.")
    while follow:
        time.sleep(POLL_S)
        show(_ask(url, AT_ONCE, exact=as_json))


def _ask(url: str, limit: int, *, exact: bool) -> list[EventLine]:
    events = get_json(url, "/v1/events", exact=exact, limit=str(limit))
    alerts = get_json(url, "/v1/alerts", exact=exact, limit=str(limit))["recent"]
    return merged(events, alerts)[-limit:]


def merged(events: Iterable[dict[str, Any]], alerts: Iterable[dict[str, Any]]) -> list[EventLine]:
    """Return events and alerts as one list, the oldest first."""
    return sorted((*map(_of_event, events), *map(_of_alert, alerts)), key=lambda each: each.unix_ms)


def _of_event(event: dict[str, Any]) -> EventLine:
    moved = " → ".join(part for part in (event["worker"], event["role"]) if part)
    return EventLine(
        unix_ms=event["unix_ms"],
        kind=event["action"],
        subject=moved,
        text=event["reason"],
        worker=event["worker"],
        role=event["role"],
        actor=event["actor"] or event["planner"],
    )


def _of_alert(alert: dict[str, Any]) -> EventLine:
    over = alert["ended_unix_ms"] is not None
    return EventLine(
        unix_ms=alert["ended_unix_ms"] if over else alert["started_unix_ms"],
        kind="alert_over" if over else "alert",
        subject=" ".join((alert["name"], *alert["labels"].values())),
        text=alert["ended_because"] or alert["reason"],
        worker=alert["labels"].get("worker", ""),
    )


def line(happened: EventLine) -> Text:
    """Return time, kind, subject, reason and author of an event."""
    at = time.strftime("%H:%M:%S", time.localtime(happened.unix_ms / 1e3))
    return Text.assemble(
        (f"{at}.{happened.unix_ms % 1000 // 100}  ", "dim"),
        (f"{happened.kind.replace('_', ' '):<16} ", STYLES.get(happened.kind, "")),
        (f"{happened.subject}: " if happened.subject else "", "bold"),
        happened.text,
        (f"  ({happened.actor})" if happened.actor else "", "dim"),
    )
