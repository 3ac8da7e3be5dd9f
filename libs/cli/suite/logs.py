"""The command `fulcrum logs`: the end of a process's log, and lines that are added to it."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.launch.ready import logs_folder

POLL_S: Final = 0.2
CHUNK_BYTES: Final = 64 * 1024
LEVEL_STYLES: Final = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
SHOWN_APART: Final = ("event", "level", "timestamp", "service", "exception")


def show_logs(ready_file: Path | None, worker: str | None, *, follow: bool, limit: int, as_json: bool) -> None:
    """Print log lines. Raises StartupError if the suite runs elsewhere or has no such process."""
    folder, console = logs_folder(find_suite(ready_file).gateway_port), make_console()
    names = sorted(path.stem for path in folder.glob("*.log"))
    if not names:
        raise StartupError(f"there are no logs in {folder}: a suite logs on the machine on which it runs")
    if worker is None:
        print(json.dumps(names) if as_json else plain("\n".join(names), lines=True))
        return
    if worker not in names:
        raise StartupError(f"there is no log of {worker!r} in {folder}, but of: {', '.join(names)}")
    log = folder / f"{worker}.log"
    for line in tail(log, limit, follow=follow):
        if as_json:
            print(line, flush=True)
        else:
            console.print(readable(line), soft_wrap=True)


def tail(path: Path, limit: int, *, follow: bool) -> Iterator[str]:
    """Yield the last `limit` lines, and with `follow` new ones, also after the file was truncated or replaced."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        at, rest = os.fstat(descriptor).st_size, b""
        yield from _last(descriptor, at, limit)
        while follow:
            size = os.fstat(descriptor).st_size
            if size < at:  # cut: the launcher has put it aside
                at, rest = 0, b""
            if size == at:
                time.sleep(POLL_S)
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
