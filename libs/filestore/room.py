"""What of a store's bound is taken: by its files, measured now and then, and by what this process is writing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from libs.contracts.errors import StoreFull

REMEASURE_BYTES = 64 * 1024 * 1024
"""Written by this process, before it is asked again what others have written."""


class Room:
    """Room of one store in one process. Drafts that are written at the same time take from one bound."""

    def __init__(self, max_bytes: int, measure: Callable[[], Awaitable[int]]) -> None:
        """`measure`: bytes of all that is in the store, without drafts of this process."""
        self._max_bytes = max_bytes
        self._measure = measure
        self._measuring = asyncio.Lock()
        self._there_bytes = 0
        self._draft_bytes = 0
        self._unmeasured_bytes = 0

    async def measure(self) -> None:
        """Look at what is there; raises what measuring raises."""
        async with self._measuring:
            self._unmeasured_bytes = 0
            self._there_bytes = await self._measure()

    async def take(self, more_bytes: int) -> None:
        """For a draft, which gives them back in the end; raises StoreFull."""
        self._unmeasured_bytes += more_bytes
        if self._unmeasured_bytes >= REMEASURE_BYTES:
            await self.measure()
        self.check(more_bytes)
        self._draft_bytes += more_bytes

    def check(self, more_bytes: int = 0) -> None:
        """Raises StoreFull when there is, or with these would be, more than there may be."""
        if self._there_bytes + self._draft_bytes + more_bytes > self._max_bytes:
            raise StoreFull("the file store has no room for the file: delete some")

    def give(self, draft_bytes: int) -> None:
        """The draft is gone."""
        self._draft_bytes -= draft_bytes

    @asynccontextmanager
    async def keeping(self, draft_bytes: int) -> AsyncIterator[None]:
        """While a draft becomes a file nothing is measured, so that it counts once: `give` has been done then."""
        async with self._measuring:
            yield
            self._there_bytes += draft_bytes
            self._draft_bytes -= draft_bytes
