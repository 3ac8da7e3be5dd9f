"""The registry in Redis: a lease key for each worker, a set of their ids, and a channel that tells of changes."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from google.protobuf.message import DecodeError
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.registry.port import RegistryDown
from libs.runtime.backoff import Backoff
from libs.runtime.redis import make_redis

log = structlog.get_logger()

SOCKET_TIMEOUT_MS = 500
CALL_TIMEOUT_S = 1.5
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
MAX_COALESCED_CHANGES = 1000
"""Pushed changes that one list may answer."""

T = TypeVar("T")

# Incarnations are 20 digits, so that comparing text compares numbers: Lua's own are not exact beyond 2**53.
_ANNOUNCE = """
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'worker')
if held[1] and held[1] > ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'worker', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
if held[2] ~= ARGV[3] then redis.call('PUBLISH', KEYS[3], ARGV[1]) end
return 1
"""
_WITHDRAW = """
local held = redis.call('HGET', KEYS[1], 'incarnation')
if held and held > ARGV[2] then return 0 end
if redis.call('DEL', KEYS[1]) + redis.call('SREM', KEYS[2], ARGV[1]) > 0 then
  redis.call('PUBLISH', KEYS[3], ARGV[1])
end
return 1
"""
# The id goes only if its lease is still gone: the worker may have come back since the list was read.
_PRUNE = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
"""


class RedisRegistry:
    """Registry over Redis 6.2 or later. A newer incarnation's registration is never replaced by an older one's."""

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._announce = self._redis.register_script(_ANNOUNCE)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._prune = self._redis.register_script(_PRUNE)

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Register or renew; the change is pushed to `watch` when anything but the lease differs."""
        value = worker.SerializeToString(deterministic=True)
        lease = (worker.id, f"{worker.incarnation:020d}", value, lease_ms)
        await _bounded(self._announce(keys=self._keys(worker.id), args=lease))

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation has taken its place."""
        args = [worker_id, f"{incarnation:020d}"]
        await _bounded(self._withdraw(keys=self._keys(worker_id), args=args))

    async def workers(self) -> list[Worker]:
        """Those whose lease holds, by id: two round trips, and a third when some are dead."""
        return await _bounded(self._read())

    async def watch(self, *, poll_ms: int = 1000) -> AsyncGenerator[list[Worker], None]:
        """The list now, then after every pushed change and at least every `poll_ms`; outages are waited out."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            try:
                async with aclosing(self._watch_once(poll_ms)) as lists:
                    async for workers in lists:
                        backoff.reset()
                        yield workers
            except RegistryDown as error:
                wait_s = backoff.next_s()
                _stop_if_cancelled()
                if backoff.failures == 1:
                    log.warning("registry is away", error=str(error))
                await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self._redis.aclose()

    def _keys(self, worker_id: str) -> list[str]:
        return [
            keys.worker(self._cluster, worker_id),
            keys.workers(self._cluster),
            keys.worker_changes(self._cluster),
        ]

    async def _read(self) -> list[Worker]:
        reply: Any = await self._redis.smembers(keys.workers(self._cluster))
        ids = sorted(member.decode() for member in reply)
        if not ids:
            return []
        reads = self._redis.pipeline(transaction=False)
        for worker_id in ids:
            reads.hget(keys.worker(self._cluster, worker_id), "worker")
        values: list[bytes | None] = await reads.execute()
        dead = [worker_id for worker_id, value in zip(ids, values, strict=True) if value is None]
        if dead:
            await asyncio.gather(*(self._prune(keys=self._keys(worker_id)[:2], args=[worker_id]) for worker_id in dead))
        return [worker for value in values if value is not None and (worker := _decode(value)) is not None]

    async def _watch_once(self, poll_ms: int) -> AsyncGenerator[list[Worker], None]:
        """Lists over one connection, until it fails with RegistryDown."""
        changes = self._redis.pubsub()
        try:
            # Confirmed before the first list is read, so that no change falls between the two.
            await _bounded(_subscribe(changes, keys.worker_changes(self._cluster)))
            while True:
                yield await self.workers()
                await _wait_for_change(changes, poll_ms / 1000)
                _stop_if_cancelled()
        finally:
            await changes.aclose()  # type: ignore[no-untyped-call]


async def _subscribe(changes: PubSub, channel: str) -> None:
    await changes.subscribe(channel)
    while await changes.get_message(timeout=CALL_TIMEOUT_S) is None:
        pass  # `_bounded` ends it


async def _wait_for_change(changes: PubSub, timeout_s: float) -> None:
    """Return at a pushed change (all that came together count as one) or after `timeout_s`.

    A subscription that redis-py renewed on a new connection counts as a change: there may have been some in between.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    try:
        while (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            if await changes.get_message(timeout=left_s) is not None:
                break
        for _ in range(MAX_COALESCED_CHANGES):
            if await changes.get_message(timeout=0) is None:
                return
    except (RedisError, OSError) as error:
        raise RegistryDown(str(error)) from error


def _stop_if_cancelled() -> None:
    """Take up a cancellation that was lost: asyncio.timeout, under every read of redis-py, turns one that was asked for
    just before it was entered, and falls together with its own end, into its TimeoutError.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _bounded(call: Awaitable[T]) -> T:
    """The call's result; raises RegistryDown for whatever keeps Redis from answering in time."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call
    except (RedisError, OSError, TimeoutError) as error:
        raise RegistryDown(str(error) or "no answer in time") from error


def _decode(value: bytes) -> Worker | None:
    try:
        return Worker.FromString(value)
    except DecodeError:
        return None
