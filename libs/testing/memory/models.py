"""The model catalogue over a store in memory."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from libs.runtime.backoff import Backoff
from libs.stores.catalogue import (
    CALL_TIMEOUT_S,
    Catalogued,
    CatalogueDown,
    LoadTimes,
    ModelEntry,
    ModelOutlook,
    ModelUse,
    Uses,
)
from libs.stores.watching import BACKOFF_FIRST_S, BACKOFF_MAX_S
from libs.testing.memory.server import ServerAway
from libs.testing.memory.store import MemoryStore

T = TypeVar("T")


class MemoryCatalogue:
    """A ModelCatalogue of one cluster."""

    def __init__(self, store: MemoryStore, cluster: str) -> None:
        self._store = store
        self._cluster = cluster

    async def put(self, *entries: ModelEntry) -> None:
        await self._ask(lambda: self._store.models.put(self._cluster, entries))

    async def remove(self, name: str) -> bool:
        """Remove a model and return whether it existed."""
        return await self._ask(lambda: self._store.models.remove(self._cluster, name))

    async def measured(self, name: str, times: LoadTimes) -> None:
        """Record a model's measured load time."""
        await self._ask(lambda: self._store.models.measured(self._cluster, name, times))

    async def read(self) -> Catalogued:
        return await self._ask(lambda: self._store.models.read(self._cluster))

    async def watch(self, *, poll_ms: int = 2_000) -> AsyncGenerator[Catalogued, None]:
        """Yield the catalogue now, after every change, and at least every `poll_ms`."""
        async with aclosing(self._watch(self.read, poll_ms)) as found:
            async for each in found:
                yield each

    async def publish_outlooks(self, outlooks: Mapping[str, ModelOutlook], *, lease_ms: int) -> None:
        """Publish the planner's expectations."""
        await self._ask(lambda: self._store.models.publish_outlooks(self._cluster, outlooks, lease_ms))

    async def use(self, gateway_id: str, uses: Mapping[str, ModelUse], *, lease_ms: int) -> None:
        """Publish one gateway's use of models."""
        await self._ask(lambda: self._store.models.use(self._cluster, gateway_id, uses, lease_ms))

    async def uses(self) -> Uses:
        """Return the use reported by gateways whose lease holds."""
        return await self._ask(lambda: self._store.models.uses(self._cluster))

    async def watch_uses(self, *, poll_ms: int = 1_000) -> AsyncGenerator[Uses, None]:
        """Yield the use now, after every `use`, and at least every `poll_ms`."""
        async with aclosing(self._watch(self.uses, poll_ms)) as found:
            async for each in found:
                yield each

    async def close(self) -> None: ...

    async def _watch(self, read: Callable[[], Awaitable[T]], poll_ms: int) -> AsyncGenerator[T, None]:
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            seen, life = self._store.news.rung, self._store.life
            try:
                yield await read()
            except CatalogueDown:
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            if await self._store.news.past(seen, poll_ms / 1000) and self._store.life == life:
                await self._store.news_travel()

    async def _ask(self, act: Callable[[], T]) -> T:
        try:
            return await self._store.call(act, timeout_s=CALL_TIMEOUT_S)
        except ServerAway as error:
            raise CatalogueDown(str(error)) from error
