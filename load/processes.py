"""CPU time, waits for a core, and memory of a bench's processes, as the kernel counts them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

OTHERS = "others"
LOAD = "load"

Kinds = Mapping[str, Sequence[psutil.Process]]
"""Processes by what they are."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of one kind together."""

    cpu_s: float
    rss_mb: float


def processes_below(pid: int, words: Mapping[str, str]) -> Kinds:
    """`pid` and all below it by kind: the kind of the first of `words` on the command line, else "others"."""
    root = psutil.Process(pid)
    found: dict[str, list[psutil.Process]] = {}
    for process in (root, *root.children(recursive=True)):
        line = process.cmdline()
        kind = next((kind for word, kind in words.items() if word in line), OTHERS)
        found.setdefault(kind, []).append(process)
    return found


def usage(kinds: Kinds) -> dict[str, Usage]:
    """By kind, as of now, with this process as "load"."""
    return {kind: _sum(processes) for kind, processes in {**kinds, LOAD: [psutil.Process(os.getpid())]}.items()}


def waited_s(pid: int) -> float:
    """How long its main thread was runnable and had no core, since it began; 0 where the kernel does not count it."""
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
