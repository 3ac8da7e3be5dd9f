"""Memory that a process has freed, back to the system.

Many small blocks of C libraries, such as a tokenizer's, leave glibc's arenas with holes that it keeps: after a burst of
long prompts a gateway stayed at twice its size.
"""

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Final

LOOK_S: Final = 5.0
MOST_PAUSE_S: Final = 60.0
"""Between two attempts where the last ones have brought little."""
GROWN: Final = 1.05
"""An attempt is made once the process is larger than this times its smallest size."""
_STATM: Final = Path("/proc/self/statm")


class Attempts:
    """When freed memory is given back. Pure."""

    def __init__(self) -> None:
        self._smallest = 0
        self._left = 0
        """The process's size after the last attempt."""
        self._pause_s = LOOK_S
        self._next_s = 0.0

    def due(self, size_bytes: int, now_s: float) -> bool:
        """Whether the process has grown enough for an attempt."""
        self._smallest = min(size_bytes, self._smallest or size_bytes)
        if size_bytes <= self._smallest * GROWN:
            return False
        return now_s >= self._next_s or size_bytes > self._left * GROWN

    def made(self, before_bytes: int, after_bytes: int, now_s: float) -> None:
        """Pause longer after an attempt that brought little: what the process has grown by is in use."""
        helped = after_bytes * GROWN < before_bytes
        self._left = after_bytes
        self._pause_s = LOOK_S if helped else min(2 * self._pause_s, MOST_PAUSE_S)
        self._next_s = now_s + self._pause_s


def resident_bytes() -> int:
    """How much memory this process has; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


async def give_memory_back() -> None:
    """Have the allocator give back what is free, from time to time, until cancelled. Return at once where the system
    has no such call, as musl and macOS have none."""
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
