"""Calls to Linux about this process: slices of its threads, their waits for a CPU, and the return of freed memory.

Linux 6.12 and later accepts a slice for every ordinary thread (EEVDF), the time for which it computes while others wait
for its core. It is no priority, and every thread's share of the cores stays what it was. A thread that asks for a short
slice is served sooner: when it wakes up, it preempts one that asked for a longer slice. Threads and processes inherit
the slice of the thread that starts them.
"""

import asyncio
import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
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


def run_delay_ns(schedstat: str) -> int | None:
    """Return how long a thread has been runnable without a CPU, from the text of its `schedstat` file.

    Return None for text of another form, and where the kernel does not count, which it shows as three zeros.
    """
    fields = schedstat.split()
    if len(fields) != 3 or not all(each.isascii() and each.isdigit() for each in fields):
        return None
    ran_ns, delay_ns, turns = map(int, fields)
    return delay_ns if ran_ns or delay_ns or turns else None


# A thread's file takes 2 us to read once it is open and 40 us to open, so 128 threads take a quarter of a millisecond.
MAX_THREADS: Final = 128
MAX_PROCESSES: Final = 64
# The interval at which threads that have started or ended are noticed.
RELIST_S: Final = 1.0
_SCHEDSTAT_BYTES: Final = 96


class CpuWaitReader:
    """The waits for a CPU of the threads of this process and its descendants, such as vLLM's EngineCore."""

    def __init__(self, proc: Path = Path("/proc"), pid: int | None = None) -> None:
        self._proc = proc
        self._pid = os.getpid() if pid is None else pid
        self._files: dict[tuple[int, int], int] = {}
        """Open `schedstat` files by process and thread."""
        self._delays_ns: dict[tuple[int, int], int] = {}

    def take(self) -> int | None:
        """Return the wait since the last call of the thread that waited longest, in nanoseconds.

        Return None as long as nothing is known.
        """
        # The longest wait, not the sum: a step is over when its last thread is.
        waits = [wait_ns for thread in self._files if (wait_ns := self._wait_ns(thread)) is not None]
        return max(waits, default=None)

    async def run(self) -> None:
        """Notice threads that have started or ended, until cancelled."""
        try:
            while True:
                self.follow(await asyncio.to_thread(self.threads))  # on a thread, as it takes milliseconds
                await asyncio.sleep(RELIST_S)
        finally:
            self.close()

    def follow(self, threads: Sequence[tuple[int, int]]) -> None:
        """Read these threads from now on, and no others."""
        for gone in self._files.keys() - set(threads):
            os.close(self._files.pop(gone))
            self._delays_ns.pop(gone, None)
        for pid, thread in threads:
            if (pid, thread) not in self._files:
                try:
                    path = self._proc / str(pid) / "task" / str(thread) / "schedstat"
                    self._files[pid, thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError:  # it has ended, or the kernel has no such file
                    continue
                self._wait_ns((pid, thread))

    def close(self) -> None:
        """Close the files from which the waits of threads are read."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._delays_ns.clear()

    def _wait_ns(self, thread: tuple[int, int]) -> int | None:
        """Return a thread's wait since it was last read; None on the first reading and for one that has ended."""
        try:
            delay_ns = run_delay_ns(os.pread(self._files[thread], _SCHEDSTAT_BYTES, 0).decode("ascii", "replace"))
        except OSError:
            return None
        if delay_ns is None:
            return None
        before_ns, self._delays_ns[thread] = self._delays_ns.get(thread), delay_ns
        return None if before_ns is None else max(delay_ns - before_ns, 0)

    def threads(self) -> list[tuple[int, int]]:
        """Return (process, thread) of at most `MAX_THREADS`, main threads first: they run loops and steps."""
        found = [(pid, thread) for pid in self._processes() for thread in _numbers(self._proc / str(pid) / "task")]
        found.sort(key=lambda each: each[0] != each[1])
        return found[:MAX_THREADS]

    def _processes(self) -> Sequence[int]:
        found = [self._pid]
        for pid in found:  # grows while it is walked
            found.extend(islice(self._children(pid), MAX_PROCESSES - len(found)))
        return found

    def _children(self, pid: int) -> Iterator[int]:
        tasks = self._proc / str(pid) / "task"
        for thread in _numbers(tasks):
            try:
                words = (tasks / str(thread) / "children").read_text().split()
            except OSError:
                continue
            yield from (int(word) for word in words if word.isdigit())


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())
    except OSError:
        return []


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
    """Return the allocator's free memory to the system from time to time, until cancelled.

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
