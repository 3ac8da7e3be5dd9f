"""How long a thread computes at a stretch where others want its core, and by that how soon it gets one itself.

Linux from 6.12 on takes a slice for every thread of the ordinary kind (EEVDF). It is no priority: everybody's share of
the cores stays what it was. But one that asks for little at a time is served sooner, and takes the core over from one
that asked for more as soon as it wakes up. Threads inherit the slice of the one that starts them, and processes too.
"""

import ctypes
import os
import platform
import struct
from typing import Final

LOOP_SLICE_NS: Final = 200_000
"""The slice of threads that answer: event loops, and gRPC's threads between them and the sockets."""
COMPUTE_SLICE_NS: Final = 10_000_000
"""The slice of threads that compute for a whole step: they lose nothing by waiting, and less by being interrupted
seldom."""
USUAL_SLICE_NS: Final = 0
"""The kernel's own, some 3 ms. Of threads that work for a loop, which hold its interpreter lock or have somebody wait
for them: soon served where others compute for whole steps, and never in the way of a loop."""
_CALLS: Final = {"x86_64": 314, "aarch64": 274}
"""Numbers of sched_setattr, which the C library has no function for before glibc 2.41."""
ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, two utilisation hints."""


def ask_slice(slice_ns: int) -> bool:
    """Ask for a slice for the calling thread; False, and nothing changed, where that cannot be asked.

    Linux before 6.12 takes the request and ignores it.
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
