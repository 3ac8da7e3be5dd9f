"""The KV index, which finds the workers that hold a KV block: its port, and its adapter to Redis.

Losing the index costs reuse, never a request. Redis has one set of block hashes per model and worker, which expires
with the worker's lease. A worker's changes are mirrored in its process. If one fails, or the set is missing, the next
change or renewal writes the whole set again. The index thereby recovers from an outage and from a Redis that came back
empty.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog
from redis.exceptions import RedisError

from libs.contracts import keys
from libs.runtime.redis import is_wrong_type, make_redis


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """Prompts of one model as ordered block hashes, and the workers to look up."""

    model: str
    prompts: Sequence[Sequence[bytes]]
    worker_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class KvIndexStats:
    lookups: int
    """The number of attempted round trips for prefixes."""
    lookup_errors: int
    """The number of look-ups that found nothing because the store was away."""
    change_errors: int
    """The number of changes and renewals that the store did not accept. The next one repairs them."""


class KvIndex(Protocol):
    """Block locations by chained hash (libs/contracts/hashing.py). No method raises while the store is away."""

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Add the blocks that a worker has stored, then remove those that it has evicted."""
        ...

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        """Extend the lease of a worker's blocks, which all disappear when it ends."""
        ...

    async def forget(self, model: str, worker_id: str) -> None:
        """Drop all blocks of a worker that restarts or leaves."""
        ...

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        """Return for each prompt of each query how many of its leading blocks each worker holds, in one round trip.

        Workers that hold none are left out, so a store that is away looks like one that holds nothing.
        """
        ...

    def stats(self) -> KvIndexStats: ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


# The maximum number of blocks listed per worker, which take about 100 MB for hashes here and as much in the store.
MAX_LISTED_BLOCKS = 1_000_000


@dataclass(slots=True)
class Mirror:
    """A copy of the blocks that the store lists for one worker."""

    lease_ms: int
    blocks: set[bytes] = field(default_factory=set)
    in_doubt: bool = False
    """True if the store may differ, because a change was not confirmed. If so, the whole copy is written again."""

    def apply(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> list[bytes]:
        """Apply a change, stored blocks before removed ones, and return the stored blocks to be listed."""
        room = MAX_LISTED_BLOCKS - len(self.blocks)
        listed = list(stored[: max(0, room)])
        self.blocks.update(listed)
        self.blocks.difference_update(removed)
        return listed


def distinct(hashes: Sequence[Sequence[bytes]]) -> list[bytes]:
    # Prompts that begin alike share their first blocks.
    return list(dict.fromkeys(block for prompt in hashes for block in prompt))


def leading_blocks(prompt: Sequence[bytes], held: Mapping[bytes, bool]) -> int:
    """Return the length of the prompt's longest prefix of held blocks."""
    for count, block in enumerate(prompt):
        if not held[block]:
            return count
    return len(prompt)


def probes(blocks: int, at_most: int) -> list[int]:
    """Return the depths in 1..blocks to probe for a prefix: all of them, or `at_most` evenly spaced ones up to the
    last.

    A chained hash represents all blocks before it, and pools evict a chain from its end. A holder of one block
    therefore holds all preceding blocks.
    """
    if blocks <= at_most:
        return list(range(1, blocks + 1))
    return [blocks * number // at_most for number in range(1, at_most + 1)]


log = structlog.get_logger()

LOOKUP_TIMEOUT_S = 0.05
CHANGE_TIMEOUT_S = 1.0
SOCKET_TIMEOUT_MS = 500
# Look-ups pause this long after a failure, so that requests do not each wait for a store that is away.
PAUSE_S = 0.5
FIRST_LEASE_MS = 10_000
"""The lease of a set before its first renewal."""
CHUNK_BLOCKS = 4096

T = TypeVar("T")


class RedisKvIndex:
    """A KvIndex over Redis 6.2 or later."""

    def __init__(self, url: str, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        self._cluster = cluster
        self._lookup_timeout_s = lookup_timeout_s
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._mirrors: dict[str, Mirror] = {}
        self._changing = asyncio.Lock()
        self._paused_until_s = 0.0
        self._lookups = 0
        self._lookup_errors = 0
        self._change_errors = 0
        self._away = False
        """True if the present outage has been logged."""

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        key = keys.kv_blocks(self._cluster, model, worker_id)
        async with self._changing:
            mirror = self._mirror(key)
            await self._write(key, mirror, mirror.apply(stored, removed), removed)

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        key = keys.kv_blocks(self._cluster, model, worker_id)
        async with self._changing:
            mirror = self._mirror(key)
            mirror.lease_ms = lease_ms
            await self._write(key, mirror, (), ())

    async def forget(self, model: str, worker_id: str) -> None:
        key = keys.kv_blocks(self._cluster, model, worker_id)
        async with self._changing:
            self._mirrors.pop(key, None)
            try:
                await _within(CHANGE_TIMEOUT_S, self._redis.unlink(key))
            except (RedisError, OSError, TimeoutError) as error:
                self._mirror(key).in_doubt = True
                self._change_errors += 1
                self._failed("forget", error)

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        found: list[list[dict[str, int]]] = [[{} for _ in query.prompts] for query in queries]
        lookups = [
            (worker_id, query, maps)
            for query, maps in zip(queries, found, strict=True)
            if any(query.prompts)
            for worker_id in query.worker_ids
        ]
        if lookups:
            self._lookups += 1
            sets = [
                (keys.kv_blocks(self._cluster, query.model, worker_id), distinct(query.prompts))
                for worker_id, query, _ in lookups
            ]
            for (worker_id, query, maps), held in zip(lookups, await self._held(sets), strict=False):
                for prompt, counts in zip(query.prompts, maps, strict=True):
                    if count := leading_blocks(prompt, held):
                        counts[worker_id] = count
        return [list(maps) for maps in found]

    def stats(self) -> KvIndexStats:
        return KvIndexStats(self._lookups, self._lookup_errors, self._change_errors)

    async def close(self) -> None:
        await self._redis.aclose()

    def _mirror(self, key: str) -> Mirror:
        return self._mirrors.setdefault(key, Mirror(lease_ms=FIRST_LEASE_MS))

    async def _held(self, sets: Sequence[tuple[str, Sequence[bytes]]]) -> list[dict[bytes, bool]]:
        """Return the requested blocks that each set holds, or an empty list while Redis is away."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._paused_until_s:
            self._lookup_errors += 1
            return []
        asks = self._redis.pipeline(transaction=False)
        for key, wanted in sets:
            asks.smismember(key, list(wanted))
        try:
            answers = await _within(self._lookup_timeout_s, asks.execute(raise_on_error=False))
            held = [self._answer(wanted, answer) for (_, wanted), answer in zip(sets, answers, strict=True)]
        except (RedisError, OSError, TimeoutError) as error:
            self._paused_until_s = now_s + PAUSE_S
            self._lookup_errors += 1
            self._failed("look-up", error)
            return []
        self._away = False
        return held

    def _answer(self, wanted: Sequence[bytes], answer: Any) -> dict[bytes, bool]:
        """Return the blocks that a set holds.

        A key of another type holds none. The worker writes it again with its next renewals, and other look-ups must not
        fail until then.
        """
        if is_wrong_type(answer):
            self._lookup_errors += 1
            return dict.fromkeys(wanted, False)
        if isinstance(answer, Exception):
            raise answer
        return dict(zip(wanted, map(bool, answer), strict=True))

    async def _write(self, key: str, mirror: Mirror, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Update the store by only the change, or by the whole mirror if the two may differ."""
        differs, mirror.in_doubt = mirror.in_doubt, True  # until the store has confirmed, even on cancellation
        try:
            if not differs:
                differs = await self._write_change(key, mirror, stored, removed) != len(mirror.blocks)
            if differs:
                await self._write_all(key, mirror)
            mirror.in_doubt = False
            self._away = False
        except (RedisError, OSError, TimeoutError) as error:
            self._change_errors += 1
            self._failed("change", error)

    async def _write_change(self, key: str, mirror: Mirror, stored: Sequence[bytes], removed: Sequence[bytes]) -> int:
        """Write a change and return the number of blocks that the store lists afterwards."""
        pipe = self._redis.pipeline(transaction=True)
        for chunk in _chunks(stored):
            pipe.sadd(key, *chunk)
        for chunk in _chunks(removed):
            pipe.srem(key, *chunk)
        pipe.pexpire(key, mirror.lease_ms)
        pipe.scard(key)
        return int((await _within(CHANGE_TIMEOUT_S, pipe.execute()))[-1])

    async def _write_all(self, key: str, mirror: Mirror) -> None:
        pipe = self._redis.pipeline(transaction=True)
        pipe.unlink(key)
        for chunk in _chunks(list(mirror.blocks)):
            pipe.sadd(key, *chunk)
        pipe.pexpire(key, mirror.lease_ms)
        await _within(CHANGE_TIMEOUT_S, pipe.execute())

    def _failed(self, what: str, error: Exception) -> None:
        if not self._away:
            log.warning("KV index does not answer", call=what, error=repr(error))
        self._away = True


def _chunks(blocks: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (blocks[start : start + CHUNK_BLOCKS] for start in range(0, len(blocks), CHUNK_BLOCKS))


async def _within(timeout_s: float, call: Awaitable[T]) -> T:
    async with asyncio.timeout(timeout_s):
        return await call
