"""The sampler of hardware counters, of which one per host is active: the worker that holds a lock file."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from libs.counters.port import GpuCounters, GpuReading

log = structlog.get_logger()

PERIOD_S: Final = 1.0
LOCK_NAME: Final = "fulcrum-gpu-counters.lock"


class GpuSampler:
    """A sampler that reads the counters every second while it holds the lock.

    The kernel frees the lock of a process that dies, and another worker takes over. Workers that do not share the
    folder (containers) all sample, which readers can tell by the GPU's own id.
    """

    def __init__(
        self, open_counters: Callable[[], GpuCounters | None], folder: Path, *, period_s: float = PERIOD_S
    ) -> None:
        self._period_s = period_s
        self._open_counters = open_counters
        self._path = folder / LOCK_NAME
        self._fresh: Sequence[GpuReading] = ()

    @property
    def fresh(self) -> bool:
        """Whether there are readings that have not been taken."""
        return bool(self._fresh)

    def take(self) -> Sequence[GpuReading]:
        """Return and clear the readings that have not been taken."""
        fresh, self._fresh = self._fresh, ()
        return fresh

    async def run(self) -> None:
        """Sample until cancelled; return at once if the host has no counters."""
        counters = await asyncio.to_thread(self._open_counters)
        if counters is None:
            return
        try:
            with contextlib.ExitStack() as stack:
                held = False
                while True:
                    held = held or self._lock(stack)
                    if held:
                        self._fresh = await asyncio.to_thread(counters.read)
                    await asyncio.sleep(self._period_s)
        finally:
            counters.close()

    def _lock(self, stack: contextlib.ExitStack) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            log.warning("no lock for GPU counters", error=str(error))
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        stack.callback(os.close, descriptor)
        log.info("samples the GPUs of this host")
        return True
