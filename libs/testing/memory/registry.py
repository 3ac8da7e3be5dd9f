"""The registry over a store in memory."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.runtime.backoff import Backoff
from libs.stores.registry import (
    CALL_TIMEOUT_S,
    RegistryDown,
    RegistryStats,
    Unusable,
    kept_part,
    read_kept,
    read_worker,
)
from libs.stores.watching import BACKOFF_FIRST_S, BACKOFF_MAX_S
from libs.testing.memory.server import ServerAway
from libs.testing.memory.store import MemoryStore

T = TypeVar("T")


class MemoryRegistry:
    """A Registry of one cluster, with the timeouts of the adapter to Redis."""

    def __init__(self, store: MemoryStore, cluster: str) -> None:
        self._store = store
        self._cluster = cluster
        self._skipped = 0
        self._unusable: set[tuple[str, bytes]] = set()
        """The number of entries that the last list skipped."""

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Register or renew a worker; notify `watch` if anything but the lease differs."""
        value = worker.SerializeToString(deterministic=True)
        await self._ask(
            lambda: self._store.announced(
                self._cluster, worker.id, value, incarnation=worker.incarnation, lease_ms=lease_ms
            )
        )

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation has replaced it."""
        await self._ask(lambda: self._store.withdrawn(self._cluster, worker_id, incarnation))

    async def keep_role(self, worker: Worker, *, keep_ms: int) -> None:
        """Store a worker's assignment and change; 0 ms deletes them."""
        await self._ask(lambda: self._store.role_kept(self._cluster, worker.id, kept_part(worker), keep_ms))

    async def kept_role(self, worker_id: str) -> Worker | None:
        """Return the stored assignment of a worker if it has not expired."""
        return read_kept(await self._ask(lambda: self._store.kept_role(self._cluster, worker_id)))

    async def workers(self) -> list[Worker]:
        """Return the workers whose lease holds, by id. Malformed entries are skipped and counted."""
        found: list[Worker] = []
        skipped: set[tuple[str, bytes]] = set()
        for worker_id, value in (await self._ask(lambda: self._store.workers(self._cluster))).items():
            try:
                found.append(read_worker(worker_id.encode(), value))
            except Unusable:
                skipped.add((worker_id, value))
        self._skipped += len(skipped - self._unusable)
        self._unusable = skipped
        return found

    async def watch(self, *, poll_ms: int = 1000) -> AsyncGenerator[list[Worker], None]:
        """Yield the list now, after every change, and at least every `poll_ms`, across outages."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            try:
                async with aclosing(self._watch_once(poll_ms)) as lists:
                    async for workers in lists:
                        backoff.reset()
                        yield workers
            except RegistryDown:
                await asyncio.sleep(backoff.next_s())

    def stats(self) -> RegistryStats:
        return RegistryStats(self._skipped, len(self._unusable))

    async def close(self) -> None: ...

    async def _watch_once(self, poll_ms: int) -> AsyncGenerator[list[Worker], None]:
        """Yield lists over one connection, until it breaks with RegistryDown."""
        store = self._store
        life = store.life
        while True:
            seen = store.news.rung
            yield await self.workers()
            if await store.news.past(seen, poll_ms / 1000):
                await store.news_travel()
            if store.life != life:
                raise RegistryDown("connection reset")

    async def _ask(self, act: Callable[[], T]) -> T:
        try:
            return await self._store.call(act, timeout_s=CALL_TIMEOUT_S)
        except ServerAway as error:
            raise RegistryDown(str(error)) from error
