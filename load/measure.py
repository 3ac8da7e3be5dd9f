"""Helpers that benches share: options, processes with their CPU time, core waits and memory, percentiles, tables."""

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

# Wide enough that no table breaks its rows, whatever the terminal.
WIDTH: Final = 160


def bench_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser that is described by the first paragraph of a module's docstring.

    Each option has a default, alone or in a pair with its help, and takes values of the default's type. False makes a
    flag, and a list takes one or more values.
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
    """Return an empty table under a title; columns named in `left` and the first one are aligned left."""
    table = plain_table(*columns, left=(columns[0], *left))
    table.title, table.title_justify = title, "left"
    return table


def show(*tables: Table) -> None:
    """Print tables to stdout, an empty line after each."""
    console = Console(highlight=False, width=WIDTH)
    for table in tables:
        console.print(table)
        console.print()


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]}


def rounded(value: Any, digits: int) -> Any:
    """Return a JSON value with every figure in it rounded."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each, digits) for each in value]
    return round(value, digits) if isinstance(value, float) else value


@contextmanager
def spawned(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `work(*arguments, pipe)` in a process of its own while the context is open; yield this end of the pipe."""
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

# Processes by what they are.
Kinds = Mapping[str, Sequence[psutil.Process]]


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time and memory of all processes of one kind together."""

    cpu_s: float
    rss_mb: float


def processes_below(pid: int, words: Mapping[str, str]) -> Kinds:
    """Return `pid` and all below it by kind: the kind of the first of `words` on the command line, else "others"."""
    root = psutil.Process(pid)
    found: dict[str, list[psutil.Process]] = {}
    for process in (root, *root.children(recursive=True)):
        line = process.cmdline()
        kind = next((kind for word, kind in words.items() if word in line), OTHERS)
        found.setdefault(kind, []).append(process)
    return found


def usage(kinds: Kinds) -> dict[str, Usage]:
    """Return the current usage by kind, with this process as "load"."""
    return {kind: _sum(processes) for kind, processes in {**kinds, LOAD: [psutil.Process(os.getpid())]}.items()}


def waited_s(pid: int) -> float:
    """Return how long the main thread was runnable without a core since it began; 0 where the kernel does not count
    it.
    """
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
    """One life of a process: a restarted one has another pid, and a reused pid another start."""

    name: str
    pid: int
    began_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU time and memory of named processes at a moment."""

    at_s: float
    """Monotonic time of the reading."""
    cpu_s: Mapping[ProcessKey, float]
    """User and system time of all threads since the process began."""
    rss_mb: Mapping[str, float]


def read_named(processes: Iterable[tuple[str, psutil.Process]]) -> Reading:
    """Read processes by name, several of one name added up; those that have ended meanwhile are left out."""
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
    """Return hundredths of a core between two readings, by name. All CPU time of a process that began in between
    counts.
    """
    found = dict.fromkeys((key.name for key in after.cpu_s), 0.0)
    for key, cpu_s in after.cpu_s.items():
        found[key.name] += 100 * (cpu_s - before.cpu_s.get(key, 0.0)) / (after.at_s - before.at_s)
    return found


def listener_on(port: int) -> psutil.Process | None:
    """Return this user's process that listens on the TCP port here, if one does."""
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
    """Return CPU seconds that all processes of this machine and its kernel have taken since it started."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq")))
