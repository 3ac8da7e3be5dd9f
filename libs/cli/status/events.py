"""The command `fulcrum events`: role moves, decisions, workers that started or died, and alerts in order of time."""

import json
import time
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.contracts.errors import InvalidRequest, quoted

POLL_S: Final = 0.5
# The number of events requested at each poll while following, more than happen between two polls.
AT_ONCE: Final = 200
# The maximum number of events that the service lists.
MAX_LISTED: Final = 1_000
DEFAULT_LISTED: Final = 30
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


def show_events(ready_file: Path | None, *, limit: int | None, since: str | None, follow: bool, as_json: bool) -> None:
    """Print the last events, the oldest first, and with `follow` new ones.

    `limit` is `DEFAULT_LISTED` by default, and `MAX_LISTED` with `since`. Raise InvalidRequest, StartupError.
    """
    since_ms = 0 if since is None else unix_ms_of(since, time.time(), option="--since")
    count = limit or (DEFAULT_LISTED if since is None else MAX_LISTED)
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

    known = _ask(url, max(count, AT_ONCE) if follow else count, exact=as_json)
    first = [each for each in known if each.unix_ms >= since_ms][-count:]
    # Following requests these again.
    shown.extend(each.key for each in known[: len(known) - len(first)])
    show(first)
    if not first and not follow and not as_json:
        began = "the metrics service started" if since is None else _clock(since_ms)
        console.print(f"Nothing has happened since {began}.")
    while follow:
        time.sleep(POLL_S)
        show(_ask(url, AT_ONCE, exact=as_json))


def unix_ms_of(text: str, now_s: float, *, option: str) -> int:
    """Return the Unix ms of a span before now, such as 10m, or of an ISO time. Raise InvalidRequest.

    A time without a zone is local, as events are printed.
    """
    from libs.cli.keys.book import span_s  # noqa: PLC0415 (start-up time)

    try:
        at_s = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        try:
            return int((now_s - span_s(text)) * 1e3)
        except InvalidRequest:
            raise InvalidRequest(
                f"{option} is {quoted(text)}: it must be a number and s, m, h or d, such as 10m, or a time such as "
                "2026-01-31T12:00 or 2026-01-31T12:00Z"
            ) from None
    if at_s > now_s:
        raise InvalidRequest(f"{option} {quoted(text)} is in the future")
    return int(at_s * 1e3)


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
    at = _clock(happened.unix_ms)
    return Text.assemble(
        (f"{at}.{happened.unix_ms % 1000 // 100}  ", "dim"),
        (f"{happened.kind.replace('_', ' '):<16} ", STYLES.get(happened.kind, "")),
        (f"{happened.subject}: " if happened.subject else "", "bold"),
        happened.text,
        (f"  ({happened.actor})" if happened.actor else "", "dim"),
    )


def _clock(unix_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_ms / 1e3))
