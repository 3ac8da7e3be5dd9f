"""The KV index over a store in memory."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from libs.stores.kvindex import (
    CHANGE_TIMEOUT_S,
    FIRST_LEASE_MS,
    LOOKUP_TIMEOUT_S,
    PAUSE_S,
    KvIndexStats,
    Mirror,
    PrefixQuery,
)
from libs.testing.memory.server import ServerAway
from libs.testing.memory.store import Key, MemoryStore

T = TypeVar("T")


class MemoryKvIndex:
    """A KvIndex of one cluster. As over Redis, changes are mirrored, and a set that differs is rewritten."""

    def __init__(self, store: MemoryStore, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        self._store = store
        self._cluster = cluster
        self._lookup_timeout_s = lookup_timeout_s
        self._mirrors: dict[Key, Mirror] = {}
        self._changing = asyncio.Lock()
        self._paused_until_s = 0.0
        self._lookups = self._lookup_errors = self._change_errors = 0

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Record the blocks that `worker_id` now holds, then those that it evicted."""
        key = (self._cluster, model, worker_id)
        async with self._changing:
            mirror = self._mirror(key)
            await self._write(key, mirror, mirror.apply(stored, removed), list(removed))

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        """Renew the lease of a worker's blocks, which expire all at once."""
        key = (self._cluster, model, worker_id)
        async with self._changing:
            mirror = self._mirror(key)
            mirror.lease_ms = lease_ms
            await self._write(key, mirror, [], [])

    async def forget(self, model: str, worker_id: str) -> None:
        """Drop all blocks of a worker that restarts or leaves."""
        key = (self._cluster, model, worker_id)
        async with self._changing:
            self._mirrors.pop(key, None)
            try:
                await self._change(lambda: self._store.forgotten(key))
            except ServerAway:
                self._mirror(key).in_doubt = True
                self._change_errors += 1

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        """Return how many leading blocks of each prompt each worker holds; empty maps while the store is away."""
        nothing: list[list[Mapping[str, int]]] = [[{} for _ in query.prompts] for query in queries]
        if not any(any(query.prompts) and query.worker_ids for query in queries):
            return nothing
        self._lookups += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._paused_until_s:
            try:
                return await self._store.call(
                    lambda: [[self._leading(query, prompt) for prompt in query.prompts] for query in queries],
                    timeout_s=self._lookup_timeout_s,
                )
            except ServerAway:
                self._paused_until_s = now_s + PAUSE_S
        self._lookup_errors += 1
        return nothing

    def stats(self) -> KvIndexStats:
        return KvIndexStats(self._lookups, self._lookup_errors, self._change_errors)

    async def close(self) -> None: ...

    def _mirror(self, key: Key) -> Mirror:
        return self._mirrors.setdefault(key, Mirror(lease_ms=FIRST_LEASE_MS))

    def _leading(self, query: PrefixQuery, prompt: Sequence[bytes]) -> dict[str, int]:
        found = {}
        for worker_id in query.worker_ids:
            blocks = self._store.held((self._cluster, query.model, worker_id))
            count = next((place for place, block in enumerate(prompt) if block not in blocks), len(prompt))
            if count:
                found[worker_id] = count
        return found

    async def _write(self, key: Key, mirror: Mirror, stored: list[bytes], removed: list[bytes]) -> None:
        """Write the change to the store, or the whole mirror if the two may differ."""
        differs, mirror.in_doubt = mirror.in_doubt, True  # until the store confirms, even if this call is cancelled
        store, lease_ms = self._store, mirror.lease_ms
        try:
            if not differs:
                listed = await self._change(lambda: store.changed(key, stored, removed, lease_ms))
                differs = listed != len(mirror.blocks)
            if differs:
                await self._change(lambda: store.replaced(key, set(mirror.blocks), lease_ms))
            mirror.in_doubt = False
        except ServerAway:
            self._change_errors += 1

    async def _change(self, act: Callable[[], T]) -> T:
        return await self._store.call(act, timeout_s=CHANGE_TIMEOUT_S)
