"""What `fulcrum audit` does: asks the metrics service who changed what, and prints it, the oldest first."""

import time
from collections import deque
from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json

POLL_S: Final = 1.0
AT_ONCE: Final = 1_000
MAX_SHOWN: Final = 5_000
"""Ids of events that were printed; far more than one look can bring again."""


def show_audit(ready_file: Path | None, *, limit: int, actor: str, tenant: str, follow: bool, as_json: bool) -> None:
    """Print the last events, and with `follow` those that come. Raises StartupError."""
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

    def ask(most: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get_json(url, "/v1/audit", limit=str(most), actor=actor, tenant=tenant)
        return found[::-1]

    first = ask(AT_ONCE if follow else limit)
    shown.extend(each["id"] for each in first[:-limit])
    show(first[-limit:])
    if not first and not follow and not as_json:
        console.print("Nobody has changed anything that is recorded.")
    while follow:
        time.sleep(POLL_S)
        show(ask(AT_ONCE))


def line(event: dict[str, Any]) -> Text:
    """When, who, what, and what came of it."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_ms"] / 1e3))
    who = f"{event['actor']} of {event['tenant']}" if event["tenant"] else event["actor"]
    refused = f" refused: {event['status']}" if event["status"] >= 400 else ""
    return Text.assemble(
        (f"{at}  ", "dim"),
        (f"{event['service']:<8} ", ""),
        (f"{who:<32} ", "bold"),
        event["action"],
        (f"  {event['detail']}" if event["detail"] else "", "dim"),
        (refused, "bold red"),
    )
