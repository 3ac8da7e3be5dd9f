"""What a process asks of Linux: scheduling slices of its threads, and the return of freed memory.

Linux 6.12 and later accepts a slice for every ordinary thread (EEVDF): how long it computes while others wait for its
core, and so how soon it gets one. It is no priority, and every thread's share of the cores stays what it was. A thread
that asks for a short slice is served sooner: when it wakes up, it preempts one that asked for a longer slice. Threads
and processes inherit the slice of the thread that starts them.
"""

import asyncio
import ctypes
import os
import platform
import struct
from pathlib import Path
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


# Many small blocks of C libraries, such as a tokenizer's, leave glibc's arenas with holes that it keeps. After a burst
# of long prompts a gateway stayed at twice its size.


LOOK_S: Final = 5.0
# Longest pause between attempts while they free little.
MOST_PAUSE_S: Final = 60.0
# The growth over its smallest size after which an attempt is made.
GROWN: Final = 1.05
_STATM: Final = Path("/proc/self/statm")


class MemoryReturns:
    """The schedule of attempts to return freed memory. Pure."""

    def __init__(self) -> None:
        self._smallest = 0
        self._left = 0
        """The process's size after the last attempt."""
        self._pause_s = LOOK_S
        self._next_s = 0.0

    def due(self, size_bytes: int, now_s: float) -> bool:
        """Return whether the process has grown enough for an attempt."""
        self._smallest = min(size_bytes, self._smallest or size_bytes)
        if size_bytes <= self._smallest * GROWN:
            return False
        return now_s >= self._next_s or size_bytes > self._left * GROWN

    def made(self, before_bytes: int, after_bytes: int, now_s: float) -> None:
        """Record an attempt. The pause grows after one that freed little, since the memory is then in use."""
        helped = after_bytes * GROWN < before_bytes
        self._left = after_bytes
        self._pause_s = LOOK_S if helped else min(2 * self._pause_s, MOST_PAUSE_S)
        self._next_s = now_s + self._pause_s


def resident_bytes() -> int:
    """Return how much memory this process has, or 0 if the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


async def give_memory_back() -> None:
    """Have the allocator return free memory from time to time, until cancelled.

    Return at once on systems without such a call, such as musl and macOS.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    attempts, now_s = MemoryReturns(), asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(LOOK_S)
        before = resident_bytes()
        if attempts.due(before, now_s()):
            await asyncio.to_thread(trim, 0)
            attempts.made(before, resident_bytes(), now_s())
