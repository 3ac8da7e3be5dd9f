"""Helpers that benches share: options, processes with their CPU time and memory, percentiles, tables."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from libs.cli.console import plain_table

# Wide enough for each row of a table to fit one line, whatever the terminal's width.
WIDTH: Final = 160


def bench_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser with the first paragraph of a module's docstring as its description.

    Each option has a default, alone or in a pair with its help. Values have the default's type. An option with the
    default False is a flag, and one with a list takes one or more values.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    for name, option in options.items():
        default, text = option if isinstance(option, tuple) else (option, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser


def titled_table(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """Return an empty table with a title. The first column and those in `left` are aligned left."""
    table = plain_table(*columns, left=(columns[0], *left))
    table.title, table.title_justify = title, "left"
    return table


def show(*tables: Table) -> None:
    """Print tables to stdout, each followed by an empty line."""
    console = Console(highlight=False, width=WIDTH)
    for table in tables:
        console.print(table)
        console.print()


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]}


def rounded(value: Any, digits: int) -> Any:
    """Return a JSON value with all its numbers rounded."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each, digits) for each in value]
    return round(value, digits) if isinstance(value, float) else value


@contextmanager
def spawned(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `work(*arguments, pipe)` in a new process while the context is open, and yield this end of the pipe."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


OTHERS = "others"
LOAD = "load"

# Processes by kind.
Kinds = Mapping[str, Sequence[psutil.Process]]


@dataclass(frozen=True, slots=True)
class Usage:
    """The CPU time and memory of all processes of one kind."""

    cpu_s: float
    rss_mb: float


def processes_below(pid: int, words: Mapping[str, str]) -> Kinds:
    """Return `pid` and its descendants by kind: that of the first of `words` in the command line, else "others"."""
    root = psutil.Process(pid)
    found: dict[str, list[psutil.Process]] = {}
    for process in (root, *root.children(recursive=True)):
        line = process.cmdline()
        kind = next((kind for word, kind in words.items() if word in line), OTHERS)
        found.setdefault(kind, []).append(process)
    return found


def usage(kinds: Kinds) -> dict[str, Usage]:
    """Return the current usage by kind. This process has the kind "load"."""
    return {kind: _sum(processes) for kind, processes in {**kinds, LOAD: [psutil.Process(os.getpid())]}.items()}


def waited_s(pid: int) -> float:
    """Return the time for which the main thread was runnable without a core; 0 if the kernel does not report it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _sum(processes: Sequence[psutil.Process]) -> Usage:
    cpu_s = rss_mb = 0.0
    for process in processes:
        times = process.cpu_times()
        cpu_s += times.user + times.system
        rss_mb += process.memory_info().rss / 2**20
    return Usage(cpu_s, rss_mb)


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """One life of a process. A restart changes the pid, and the start time tells two processes with one pid apart."""

    name: str
    pid: int
    began_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The CPU time and memory of named processes at one time."""

    at_s: float
    """The monotonic time of the reading."""
    cpu_s: Mapping[ProcessKey, float]
    """The user and system time of all threads since the process started."""
    rss_mb: Mapping[str, float]


def read_named(processes: Iterable[tuple[str, psutil.Process]]) -> Reading:
    """Read processes by name. Several with one name are added, and those that have ended are left out."""
    at_s, cpu_s, rss_mb = time.monotonic(), {}, dict[str, float]()
    for name, process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                cpu_s[ProcessKey(name, process.pid, process.create_time())] = times.user + times.system
                rss_mb[name] = rss_mb.get(name, 0.0) + process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return Reading(at_s, cpu_s, rss_mb)


def cpu_points(before: Reading, after: Reading) -> dict[str, float]:
    """Return the CPU time between two readings by name, in hundredths of a core.

    A process that started in between counts with all its CPU time.
    """
    found = dict.fromkeys((key.name for key in after.cpu_s), 0.0)
    for key, cpu_s in after.cpu_s.items():
        found[key.name] += 100 * (cpu_s - before.cpu_s.get(key, 0.0)) / (after.at_s - before.at_s)
    return found


def listener_on(port: int) -> psutil.Process | None:
    """Return this user's process that listens on a TCP port of this machine; None if there is none."""
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if listens and connection.pid:
            return psutil.Process(connection.pid)
    return None


def resident_mib(pid: int | None) -> float:
    """Return the resident memory of a process; 0 if there is none."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20 if pid else 0.0
    except psutil.NoSuchProcess:
        return 0.0


def machine_busy_s() -> float:
    """Return the CPU seconds of all processes and the kernel since this machine started."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq")))
