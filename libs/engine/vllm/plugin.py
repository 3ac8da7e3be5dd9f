"""A plug-in that vLLM loads first of all in each of its processes: it ties their lives to the worker's.

vLLM's EngineCore outlives a parent that is killed and keeps its memory. Linux kills it with its parent where it asks
for that (PR_SET_PDEATHSIG), and it asks before any weight is loaded.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
LEASH_VARIABLE = "FULCRUM_VLLM_LEASH"
"""Pid of the worker, set for the processes that it starts; vLLM elsewhere is left alone."""


def register() -> None:
    """Die with the parent, unless this process is the worker itself."""
    worker_pid = os.environ.get(LEASH_VARIABLE)
    if not worker_pid or os.getpid() == int(worker_pid) or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() == 1 and int(worker_pid) != 1:  # it died before the line above
        os._exit(1)
