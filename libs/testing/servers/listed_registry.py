"""A registry whose list a test controls."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.stores.registry import RegistryStats


class ListedRegistry:
    """A registry of one process."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self._workers = {worker.id: worker for worker in workers}
        self._changed = asyncio.Event()

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Add or replace a worker; leases never end here."""
        self._workers[worker.id] = worker
        self._changed.set()

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation has replaced it."""
        held = self._workers.get(worker_id)
        if held is not None and held.incarnation <= incarnation:
            del self._workers[worker_id]
            self._changed.set()

    async def workers(self) -> list[Worker]:
        """Return the workers by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    async def keep_role(self, worker: Worker, *, keep_ms: int) -> None:
        """Do nothing, as nothing outlives this process."""

    async def kept_role(self, worker_id: str) -> Worker | None:
        return None

    async def watch(self, *, poll_ms: int = 1000) -> AsyncIterator[list[Worker]]:
        """Yield the list now and after every change, to a single watcher."""
        while True:
            yield await self.workers()
            await self._changed.wait()
            self._changed.clear()

    def stats(self) -> RegistryStats:
        return RegistryStats()

    async def close(self) -> None: ...
