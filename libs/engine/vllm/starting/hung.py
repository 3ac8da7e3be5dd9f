"""Ending of a start that takes too long, with the place where each of its processes hung. Linux; without vLLM."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from libs.engine.vllm.plugin import FOLDER_VARIABLE, STACK_FILE, STACK_SIGNAL

PROC: Final = Path("/proc")
# How long processes may take to write their stacks.
STACK_S: Final = 1.0
LOOK_S: Final = 0.01
# Passes over the processes to kill: one that is about to exec shows no environment for a moment.
LOOKS: Final = 3
# Upper bound of the processes that the error names.
MAX_NAMED: Final = 3
# Python's own helper, which ends by itself and serves other processes too.
TRACKER: Final = b"resource_tracker"
FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def started_processes(folder: str) -> list[int]:
    """Return the processes that were started with this folder for their reports, oldest first."""
    return sorted(pid for pid in _pids() if pid != os.getpid() and _is_of(pid, folder))


def end_start(*, explain: bool) -> list[str]:
    """Kill the processes of the start under way. With `explain`, return where each of them hung."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:  # nothing is started yet
        return []
    stood = _stacks(Path(folder), started_processes(folder)) if explain else []
    for look in range(LOOKS):
        if look:
            time.sleep(LOOK_S)
        for pid in started_processes(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return stood


def sentence(limit_s: float, stage: str, stood: list[str]) -> str:
    """Return the error message for a start that took too long."""
    where = f": {'; '.join(stood[-MAX_NAMED:])}" if stood else ""
    return (
        f"vLLM has not started within {limit_s:g} s and its processes are ended, while {stage}{where}. Their log says"
        " what came before; FULCRUM_WORKER_VLLM_START_LIMIT_S gives them longer"
    )


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _is_of(pid: int, folder: str) -> bool:
    try:
        environ, command = (PROC / str(pid) / "environ").read_bytes(), (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # it belongs to another user, or has ended
        return False
    return f"{FOLDER_VARIABLE}={folder}".encode() in environ.split(b"\0") and TRACKER not in command


def _stacks(folder: Path, pids: list[int]) -> list[str]:
    files = {pid: folder / STACK_FILE.format(pid=pid) for pid in pids}
    # The signal would kill a process that has no handler yet.
    signalled = {pid: file for pid, file in files.items() if file.exists()}
    for pid in signalled:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    until = time.monotonic() + STACK_S
    while not all(_innermost(file) for file in signalled.values()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return [f"process {pid} in {frame}" for pid, file in signalled.items() if (frame := _innermost(file))]


def _innermost(file: Path) -> str:
    """Return the innermost frame in a dump of faulthandler; empty if there is none yet."""
    with contextlib.suppress(OSError):
        if found := FRAME.search(file.read_text(errors="replace")):
            name = found["file"].rpartition("site-packages/")[2]
            return f"{found['function']} ({name}:{found['line']})"
    return ""
