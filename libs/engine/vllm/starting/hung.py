"""Ends the processes of a start that takes too long, and says where each of them stood. Linux; without vLLM."""

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
STACK_S: Final = 1.0
"""How long processes may take to write where they stand."""
LOOK_S: Final = 0.01
LOOKS: Final = 3
"""For processes to be killed: one that is about to run its program shows no environment for a moment."""
MAX_NAMED: Final = 3
"""Processes that a sentence names."""
TRACKER: Final = b"resource_tracker"
"""Python's own helper, which ends by itself and serves others too."""
FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def started_processes(folder: str) -> list[int]:
    """All processes that were started with this folder for their reports, oldest first."""
    return sorted(pid for pid in _pids() if pid != os.getpid() and _is_of(pid, folder))


def end_start(*, explain: bool) -> list[str]:
    """Kill what the start under way has started; where each process stood, if that is to be known."""
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
    """Why the worker does not start."""
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
    except OSError:  # another user's, or gone
        return False
    return f"{FOLDER_VARIABLE}={folder}".encode() in environ.split(b"\0") and TRACKER not in command


def _stacks(folder: Path, pids: list[int]) -> list[str]:
    files = {pid: folder / STACK_FILE.format(pid=pid) for pid in pids}
    asked = {
        pid: file for pid, file in files.items() if file.exists()
    }  # the signal would kill a process without a handler
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    until = time.monotonic() + STACK_S
    while not all(_innermost(file) for file in asked.values()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return [f"process {pid} in {frame}" for pid, file in asked.items() if (frame := _innermost(file))]


def _innermost(file: Path) -> str:
    """The frame that runs, by a dump of faulthandler's; empty: there is none yet."""
    with contextlib.suppress(OSError):
        if found := FRAME.search(file.read_text(errors="replace")):
            name = found["file"].rpartition("site-packages/")[2]
            return f"{found['function']} ({name}:{found['line']})"
    return ""
