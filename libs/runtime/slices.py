"""Scheduling slices of threads: how long a thread computes while others wait for its core, and so how soon it gets
one.

Linux 6.12 and later accepts a slice for every ordinary thread (EEVDF). It is no priority, and every thread's share
of the cores stays what it was. A thread that asks for a short slice is served sooner: when it wakes up, it preempts
one that asked for a longer slice. Threads and processes inherit the slice of the thread that starts them.
"""

import ctypes
import os
import platform
import struct
from typing import Final

# For threads that respond: event loops, and gRPC's threads between them and the sockets.
LOOP_SLICE_NS: Final = 200_000
# For threads that compute for a whole step. They lose nothing by waiting, and less if they are seldom interrupted.
COMPUTE_SLICE_NS: Final = 10_000_000
# The kernel's default of some 3 ms. It is for threads that work for a loop, which hold its interpreter lock or are
# waited for: they are served soon where others compute for whole steps, and never delay a loop.
USUAL_SLICE_NS: Final = 0
# Numbers of sched_setattr, which the C library has no function for before glibc 2.41.
_CALLS: Final = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, two utilisation hints.
ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")


def ask_slice(slice_ns: int) -> bool:
    """Request a slice for the calling thread. Return False, with nothing changed, if the system has no such call.

    Linux before 6.12 accepts the request and ignores it.
    """
    call = _CALLS.get(platform.machine())
    if platform.system() != "Linux" or call is None:
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:  # musl has the function for show only
        return False
    attributes = ATTRIBUTES.pack(ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0, 0, 0)
    system_call = ctypes.CDLL(None).syscall
    return int(system_call(ctypes.c_long(call), ctypes.c_long(0), attributes, ctypes.c_long(0))) == 0
