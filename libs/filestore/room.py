"""Accounting of a store's size limit: its files, measured from time to time, and the drafts of this process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from libs.contracts.errors import StoreFull

REMEASURE_BYTES = 64 * 1024 * 1024
"""The bytes that this process writes before it measures again what others have written."""


class Room:
    """The room of one store in one process, shared by the drafts that are written at the same time."""

    def __init__(self, max_bytes: int, measure: Callable[[], Awaitable[int]]) -> None:
        """`measure` returns the bytes of everything in the store, without the drafts of this process."""
        self._max_bytes = max_bytes
        self._measure = measure
        self._measuring = asyncio.Lock()
        self._there_bytes = 0
        self._draft_bytes = 0
        self._unmeasured_bytes = 0

    async def measure(self) -> None:
        """Measure the store again; raises the errors of `measure`."""
        async with self._measuring:
            self._unmeasured_bytes = 0
            self._there_bytes = await self._measure()

    async def take(self, more_bytes: int) -> None:
        """Reserve bytes for a draft, which returns them at its end. Raises StoreFull."""
        self._unmeasured_bytes += more_bytes
        if self._unmeasured_bytes >= REMEASURE_BYTES:
            await self.measure()
        self.check(more_bytes)
        self._draft_bytes += more_bytes

    def check(self, more_bytes: int = 0) -> None:
        """Raise StoreFull if the store exceeds its limit, or would with these bytes."""
        if self._there_bytes + self._draft_bytes + more_bytes > self._max_bytes:
            raise StoreFull("the file store has no room for the file: delete some")

    def give(self, draft_bytes: int) -> None:
        """Return the bytes of a draft that has ended."""
        self._draft_bytes -= draft_bytes

    @asynccontextmanager
    async def keeping(self, draft_bytes: int) -> AsyncIterator[None]:
        """Turn a draft's bytes into those of a file. Nothing is measured meanwhile, so that they count once.

        The draft has returned its bytes afterwards and must not call `give` for them.
        """
        async with self._measuring:
            yield
            self._there_bytes += draft_bytes
            self._draft_bytes -= draft_bytes
