"""A plug-in that vLLM loads first of all in each of its processes: it ties their lives to the worker's.

vLLM's EngineCore outlives a parent that is killed and keeps its memory. Linux kills it with its parent where it asks
for that (PR_SET_PDEATHSIG), and it asks before any weight is loaded. And where it cannot start, vLLM says why in its
log alone: the plug-in leaves the reason for the worker too.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
LEASH_VARIABLE = "FULCRUM_VLLM_LEASH"
"""Pid of the worker, set for the processes that it starts; vLLM elsewhere is left alone."""
CAUSE_VARIABLE = "FULCRUM_VLLM_CAUSE"
"""Path of the file for what kept a process from starting."""


class _FirstCause(logging.Handler):
    """Writes the first exception that is logged into a new file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Of several processes, the one that failed first is heard; once the engine serves, none."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError), self._path.open("x") as file:
                file.write(str(error) or type(error).__name__)


def register() -> None:
    """Die with the parent and say why it cannot start, unless this process is the worker itself."""
    worker_pid = os.environ.get(LEASH_VARIABLE)
    if not worker_pid or os.getpid() == int(worker_pid) or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() == 1 and int(worker_pid) != 1:  # it died before the line above
        os._exit(1)
    if cause := os.environ.get(CAUSE_VARIABLE):
        logging.getLogger("vllm").addHandler(_FirstCause(cause))
