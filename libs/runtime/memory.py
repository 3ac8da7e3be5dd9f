"""Return of freed memory to the system.

Many small blocks of C libraries, such as a tokenizer's, leave glibc's arenas with holes that it keeps. After a
burst of long prompts a gateway stayed at twice its size.
"""

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Final

LOOK_S: Final = 5.0
# Longest pause between attempts while they free little.
MOST_PAUSE_S: Final = 60.0
# The growth over its smallest size after which an attempt is made.
GROWN: Final = 1.05
_STATM: Final = Path("/proc/self/statm")


class Attempts:
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
    attempts, now_s = Attempts(), asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(LOOK_S)
        before = resident_bytes()
        if attempts.due(before, now_s()):
            await asyncio.to_thread(trim, 0)
            attempts.made(before, resident_bytes(), now_s())
