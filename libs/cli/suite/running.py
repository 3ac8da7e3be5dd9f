"""The commands `fulcrum logs`, `audit` and `down`, which read and stop a running suite."""

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import UP, find_one_suite, find_suite, get_json, is_suite
from libs.cli.keys.book import span_s
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.launch.ready import logs_folder

LOG_POLL_S: Final = 0.2
CHUNK_BYTES: Final = 64 * 1024
LEVEL_STYLES: Final = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
SHOWN_APART: Final = ("event", "level", "timestamp", "service", "exception")


def show_logs(ready_file: Path | None, worker: str | None, *, follow: bool, limit: int, as_json: bool) -> None:
    """Print log lines. Raise StartupError if the suite runs elsewhere or has no such process."""
    folder, console = logs_folder(find_suite(ready_file).gateway_port), make_console()
    names = sorted(path.stem for path in folder.glob("*.log"))
    if not names:
        raise StartupError(f"there are no logs in {folder}: a suite logs on the machine on which it runs")
    if worker is None:
        print(json.dumps(names) if as_json else plain("\n".join(names), lines=True))
        return
    if worker not in names:
        raise StartupError(f"there is no log of {worker!r} in {folder}; there are logs of: {', '.join(names)}")
    log = folder / f"{worker}.log"
    for line in tail(log, limit, follow=follow):
        if as_json:
            print(line, flush=True)
        else:
            console.print(readable(line), soft_wrap=True)


def tail(path: Path, limit: int, *, follow: bool) -> Iterator[str]:
    """Yield the last `limit` lines, and with `follow` new ones, even after the file was truncated or replaced."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        at, rest = os.fstat(descriptor).st_size, b""
        yield from _last(descriptor, at, limit)
        while follow:
            size = os.fstat(descriptor).st_size
            if size < at:  # truncated: the launcher has moved the contents away
                at, rest = 0, b""
            if size == at:
                time.sleep(LOG_POLL_S)
                continue
            found = os.pread(descriptor, min(size - at, CHUNK_BYTES), at)
            at += len(found)
            *lines, rest = (rest + found).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def _last(descriptor: int, end: int, limit: int) -> list[str]:
    """Return the last lines before `end`, reading backwards until there are enough."""
    chunks: list[bytes] = []
    at, breaks = end, 0
    while at and breaks <= limit:
        length = min(at, CHUNK_BYTES)
        at -= length
        chunks.append(os.pread(descriptor, length, at))
        breaks += chunks[-1].count(b"\n")
    read = b"".join(reversed(chunks))
    return [line.decode(errors="replace") for line in read.splitlines()[-limit:]]


def readable(line: str) -> Text:
    """Return a structured line as time, level, event and fields; any other line as it is."""
    try:
        found: dict[str, Any] = json.loads(line)
        event = str(found["event"])
    except (ValueError, KeyError, TypeError):
        return Text(plain(line))
    level = str(found.get("level", ""))
    rest = " ".join(plain(f"{name}={value}") for name, value in found.items() if name not in SHOWN_APART)
    exception = f"\n{plain(str(found['exception']), lines=True)}" if "exception" in found else ""
    return Text.assemble(
        (plain(f"{str(found.get('timestamp', ''))[11:23]} "), "dim"),
        (f"{plain(level):<8}", LEVEL_STYLES.get(level, "dim")),
        f"{plain(event)} ",
        (rest, "dim"),
        exception,
    )


AUDIT_POLL_S: Final = 1.0
# The maximum number of events in one answer.
AT_ONCE: Final = 1_000
# The maximum number of pages of the topic that one command reads.
MAX_PAGES: Final = 1_000
# Ids of printed events to remember; far more than one poll can repeat.
MAX_SHOWN: Final = 5_000


@dataclass(frozen=True, slots=True)
class AuditQuery:
    limit: int = 30
    since: str | None = None
    """The time for which the topic is read back; None means only the events in the service's memory."""
    actor: str = ""
    tenant: str = ""
    refused: bool = False

    def params(self) -> dict[str, str]:
        """Return the query parameters, without a limit."""
        return {"actor": self.actor, "tenant": self.tenant, "refused": str(self.refused).lower()}


def show_audit(ready_file: Path | None, wanted: AuditQuery, *, follow: bool, as_json: bool) -> None:
    """Print the last events, and with `follow` new ones. Raise InvalidRequest, StartupError."""
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
        _note_older(page, as_json=as_json)
    show(first[-wanted.limit :])
    if not first and not follow and not as_json and not page["older"]:
        what = "asked for anything that was refused" if wanted.refused else "changed anything that is recorded"
        console.print(f"Nobody has {what}.")
    while follow:
        time.sleep(AUDIT_POLL_S)
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


def _note_older(page: dict[str, Any], *, as_json: bool) -> None:
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


# A suite ends within 10 s; a busy machine takes longer.
GONE_WITHIN_S: Final = 30.0
EXIT_POLL_S: Final = 0.05


def stop_suite(ready_file: Path | None, *, now: bool, as_json: bool) -> None:
    """Stop the suite. Raise StartupError if none runs here or it does not end."""
    suite = find_one_suite(ready_file)
    if not suite.pid:
        raise StartupError("no suite runs on this machine: `fulcrum up` starts one")
    if not is_suite(suite.pid, (UP,)):
        raise StartupError(f"process {suite.pid} is not `fulcrum up`: its ready file is old and can be removed")
    started_s = time.monotonic()
    if not as_json:
        waits = "at once" if now else "requests may finish"
        print(f"Stopping the suite at {suite.gateway} (process {suite.pid}), {waits}.", file=sys.stderr)
    os.kill(suite.pid, signal.SIGTERM)
    if now:
        time.sleep(EXIT_POLL_S)
        _signal_again(suite.pid)
    while _runs(suite.pid):
        if time.monotonic() - started_s > GONE_WITHIN_S:
            raise StartupError(
                f"process {suite.pid} has not ended within {GONE_WITHIN_S:g} s: try `fulcrum down --now`"
            )
        time.sleep(EXIT_POLL_S)
    took_s = round(time.monotonic() - started_s, 2)
    if as_json:
        print(json.dumps({"gateway": suite.gateway, "pid": suite.pid, "took_s": took_s}))
    else:
        print(f"Stopped after {took_s:.1f} s.")


def _signal_again(pid: int) -> None:
    """Send the second signal, which ends everything at once, unless the process has ended already."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Return whether the process has ended but has not been reaped by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
