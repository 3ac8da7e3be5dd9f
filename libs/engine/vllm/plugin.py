"""A plug-in that vLLM loads first of all in each of its processes. It ties their lives to the worker's, gives them back
the slice that the kernel gives anybody, lets them wait for each other on CPUs without taking a core, and has NIXL know
a model by its weights, and compiled code by what it depends on.

vLLM's EngineCore outlives a parent that is killed and keeps its memory. Linux kills it with its parent where it asks
for that (PR_SET_PDEATHSIG), and it asks before any weight is loaded. And where it cannot start, vLLM says why in its
log alone: the plug-in leaves the reason for the worker too.

vLLM's processes ask each other for news in a loop of `sched_yield` for a second after the last. Where they compute on
the same cores that is a core lost, and worse: Linux before 6.19 lets a process that has yielded a million times wait
for seconds, however idle another core is, once somebody else wants to run on its own.
"""

import contextlib
import ctypes
import faulthandler
import functools
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from libs.runtime.slices import USUAL_SLICE_NS, ask_slice

PR_SET_PDEATHSIG = 1
LEASH_VARIABLE = "FULCRUM_VLLM_LEASH"
"""Pid of the worker, set for the processes that it starts; vLLM elsewhere is left alone."""
FOLDER_VARIABLE = "FULCRUM_VLLM_FOLDER"
"""Folder of files for the worker, as long as its processes start (libs/engine/vllm/starting/start_files.py)."""
CAUSE_FILE, REGISTERED_FILE, HANDSHAKE_FILE = "cause", "registered.{pid}", "handshake.{pid}"
"""What kept a process from starting; that one is on the leash; by what NIXL knows whose blocks are like its own."""
STACK_FILE, STACK_SIGNAL = "stack.{pid}", signal.SIGUSR2
"""The file in which a process writes what it does, on this signal."""
REVISION_VARIABLE = "FULCRUM_VLLM_REVISION"
"""What identifies the weights, wherever they lie."""
NIXL_PORT, MOONCAKE_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"
"""Variables with the ports that a worker's processes listen on, new at each start."""
WAIT_VARIABLE = "FULCRUM_VLLM_WAIT"
"""Set where its processes are to sleep until there is news."""
BOARD_FILE, DUMMIES_FILE, KV_FILE = "board", "dummies", "kv"
"""The files in which EngineCore shows which step runs, which dummy steps have ended, and what its KV is like."""
HANDSHAKE_FACTOR = "nixl_connector_version"
"""Among what vLLM hashes for NIXL's handshake, and for nothing else."""
NEWS_SOON_S, NAP_MS = 1.0, 1
"""From this long after the last news on, a process sleeps no longer than this at a time: the socket drops a word that
comes within a millisecond of another."""


class _FirstCause(logging.Handler):
    """Writes the first exception that is logged into a new file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the error of the process that failed first; once the engine serves, none."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError), self._path.open("x") as file:
                file.write(str(error) or type(error).__name__)


def register() -> None:
    """Die with the parent and say why it cannot start, unless this process is the worker itself."""
    worker_pid = os.environ.get(LEASH_VARIABLE)
    if not worker_pid or os.getpid() == int(worker_pid):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == 1 and int(worker_pid) != 1:  # it died before the line above
            os._exit(1)
        ask_slice(USUAL_SLICE_NS)  # they have inherited that of the worker's loop
        if os.environ.get(WAIT_VARIABLE):
            _sleep_until_news()
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if revision := os.environ.get(REVISION_VARIABLE):
        forget_ports()
        name_model(revision, Path(folder, HANDSHAKE_FILE.format(pid=os.getpid())) if folder else None)
    if folder:
        logging.getLogger("vllm").addHandler(_FirstCause(Path(folder, CAUSE_FILE)))
        _write_stack_on_signal(Path(folder, STACK_FILE.format(pid=os.getpid())))
        with contextlib.suppress(OSError):  # the worker has waited for others, and looks no more
            Path(folder, REGISTERED_FILE.format(pid=os.getpid())).touch()


def _write_stack_on_signal(path: Path) -> None:
    """Also where it hangs in native code, which no handler of Python's own interrupts."""
    with contextlib.suppress(OSError):
        file = path.open("w")  # stays open: faulthandler writes to its descriptor
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)


def forget_ports() -> None:
    """Let vLLM know compiled code by what it depends on: by these ports too it would compile anew at each start."""
    from vllm import envs  # noqa: PLC0415

    compile_factors = envs.compile_factors

    def without_ports() -> dict[str, object]:
        return {name: value for name, value in compile_factors().items() if name not in (NIXL_PORT, MOONCAKE_PORT)}

    envs.compile_factors = without_ports


def name_model(revision: str, file: Path | None) -> None:
    """Let NIXL's handshake name the model by its revision, and write what it compares into `file`.

    vLLM names it by its folder: equal weights that lie elsewhere would be refused, at each hand-over anew.
    """
    from vllm.config import utils  # noqa: PLC0415

    hash_factors = utils.hash_factors

    def hash_named(factors: dict[str, object]) -> str:
        if HANDSHAKE_FACTOR not in factors:
            return str(hash_factors(factors))
        found = str(hash_factors(factors | {"model": revision}))
        if file is not None:
            with contextlib.suppress(OSError):
                file.write_text(found)
        return found

    utils.hash_factors = hash_named


def _sleep_until_news() -> None:
    """Readers wait at the socket by which a writer wakes them, at once and not only after a second of looking."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    wait = SpinCondition.wait

    def nap(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + NEWS_SOON_S:
            timeout_ms = NAP_MS if timeout_ms is None else min(timeout_ms, NAP_MS)
        wait(self, timeout_ms)

    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=0.0)
    SpinCondition.wait = nap
