"""The command `fulcrum audit`: prints who changed what, the oldest first."""

import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.cli.keys.book import span_s

POLL_S: Final = 1.0
# Events that one answer holds at most.
AT_ONCE: Final = 1_000
# Pages of the topic that one command reads at most.
MAX_PAGES: Final = 1_000
# Ids of printed events to remember; far more than one poll can repeat.
MAX_SHOWN: Final = 5_000


@dataclass(frozen=True, slots=True)
class AuditQuery:
    limit: int = 30
    since: str | None = None
    """How far the topic is read back; None means only what the service has in memory."""
    actor: str = ""
    tenant: str = ""
    refused: bool = False

    def params(self) -> dict[str, str]:
        """Return the query parameters, without a limit."""
        return {"actor": self.actor, "tenant": self.tenant, "refused": str(self.refused).lower()}


def show_audit(ready_file: Path | None, wanted: AuditQuery, *, follow: bool, as_json: bool) -> None:
    """Print the last events, and with `follow` new ones. Raises InvalidRequest, StartupError."""
    url, console = find_suite(ready_file).metrics, make_console()
    shown: deque[str] = deque(maxlen=MAX_SHOWN)

    def show(events: Iterable[dict[str, Any]]) -> None:
        for each in events:
            if each["id"] not in shown:
                shown.append(each["id"])
                if as_json:
                    print(dumps(each), flush=True)
                else:
                    console.print(line(each), soft_wrap=True)

    def look() -> dict[str, Any]:
        page: dict[str, Any] = get_json(url, "/v1/audit", exact=as_json, limit=str(AT_ONCE), **wanted.params())
        return page

    if wanted.since is None and (follow or wanted.limit <= AT_ONCE):
        page = look()
        if len(page["events"]) > wanted.limit:
            cut = page["events"][wanted.limit]["unix_ms"]
            page |= {"older": True, "complete_since_unix_ms": cut + 1}
    else:
        page = _read_back(url, wanted, exact=as_json)
    first = page["events"][::-1]
    shown.extend(each["id"] for each in first[: -wanted.limit])
    if page["older"]:
        _tell_of_older(page, as_json=as_json)
    show(first[-wanted.limit :])
    if not first and not follow and not as_json and not page["older"]:
        what = "asked for anything that was refused" if wanted.refused else "changed anything that is recorded"
        console.print(f"Nobody has {what}.")
    while follow:
        time.sleep(POLL_S)
        show(look()["events"][::-1])


def _read_back(url: str, wanted: AuditQuery, *, exact: bool) -> dict[str, Any]:
    """Read page after page until there are enough events or the time is reached."""
    since_ms = 0 if wanted.since is None else int((time.time() - span_s(wanted.since, "--since")) * 1e3)
    events: list[dict[str, Any]] = []
    params = {"since": str(since_ms), **wanted.params()}
    for _ in range(MAX_PAGES):
        limit = str(min(wanted.limit - len(events), AT_ONCE))
        page: dict[str, Any] = get_json(url, "/v1/audit", exact=exact, limit=limit, **params)
        events += page["events"]
        if page["next"] is None or len(events) >= wanted.limit:
            break
        params["before"] = str(page["next"])
    return page | {"events": events}


def _tell_of_older(page: dict[str, Any], *, as_json: bool) -> None:
    """Print that there may be older events, on stderr if stdout goes to a program."""
    since_ms = page["complete_since_unix_ms"]
    if as_json:
        print(dumps({"older": True, "complete_since_unix_ms": since_ms}), file=sys.stderr, flush=True)
    else:
        make_console(stderr=True, soft_wrap=True).print(
            f"Older records than of {_clock(since_ms)} are not shown: -n shows more, --since 30d reads them back.",
            style="yellow",
        )


def line(event: dict[str, Any]) -> Text:
    """Return time, actor, change and outcome of an event."""
    who = f"{event['actor']} of {event['tenant']}" if event["tenant"] else event["actor"]
    refused = f" refused: {event['status']}" if event["status"] >= 400 else ""
    repeats = event.get("repeats", 0)
    return Text.assemble(
        (f"{_clock(event['unix_ms'])}  ", "dim"),
        (f"{event['service']:<8} ", ""),
        (f"{who:<32} ", "bold"),
        event["action"],
        (f"  {event['detail']}" if event["detail"] else "", "dim"),
        (refused, "bold red"),
        (f", and {repeats} more like it" if repeats else "", "red"),
    )


def _clock(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ms / 1e3))
