"""Computing gives way to event loops. Where the two were equal, on a machine full of computing, a loop was seen to wait
0.5 s for a core."""

import os
import sys
import threading
from contextlib import suppress


def give_way(nice: int) -> None:
    """Lower this thread's priority by so much, and with it that of the threads it starts."""
    if nice and sys.platform == "linux":  # elsewhere priority is a process's
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
