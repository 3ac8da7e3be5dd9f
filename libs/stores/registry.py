"""The registry, which lists the existing workers: the port, the validation of entries, and Redis.

A worker exists as long as it renews its lease.
"""

import math
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog
import xxhash
from google.protobuf.message import DecodeError

from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import FirstToken, Role, Worker, WorkerState
from libs.contracts.ranges import fault_of
from libs.policy.newest import put_newest
from libs.runtime.redis import in_time, is_wrong_type, make_redis
from libs.stores.watching import watch_channel

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """Counters of registry entries that could not be used."""

    skipped: int = 0
    """The number of distinct entries so far that are not usable workers."""
    unusable: int = 0
    """The number of such entries in the last list."""


class Registry(Protocol):
    """The directory in which workers register and others find them. Methods raise RegistryDown while it is away."""

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Register a worker or renew its lease, notifying `watch` if anything but the lease differs.

        Do nothing while a newer incarnation is registered.
        """
        ...

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation has taken its place."""
        ...

    async def workers(self) -> list[Worker]:
        """Return the workers whose lease is valid, sorted by id."""
        ...

    async def keep_role(self, worker: Worker, *, keep_ms: int) -> None:
        """Keep a worker's assignment and its last change beyond its lease; 0 ms forgets them."""
        ...

    async def kept_role(self, worker_id: str) -> Worker | None:
        """Return the assignment and change kept for a worker; None if there are none."""
        ...

    def watch(self, *, poll_ms: int = 1000) -> AsyncIterator[list[Worker]]:
        """Yield the list now, after every pushed change, and at least every `poll_ms`. Continue through outages."""
        ...

    def stats(self) -> RegistryStats: ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


class RegistryDown(Exception):
    """The store does not respond; callers continue with their last data."""


# The largest serialized worker, a hundred times the size of a typical one.
MAX_WORKER_BYTES: Final = 65_536
PEAKS_PER_S: Final = (1e6, 1e21)
"""The plausible range of a device's FLOPs or bytes a second, from a slow microcontroller to a thousand racks."""

# The same characters that settings allow in the name of a process.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


class Unusable(Exception):
    """The reason why a value is not a usable worker."""


def read_worker(member: bytes, value: bytes) -> Worker:
    """Parse the worker stored under an id. Raise Unusable."""
    if len(value) > MAX_WORKER_BYTES:
        raise Unusable(f"{len(value)} bytes; {MAX_WORKER_BYTES} are allowed")
    try:
        worker = Worker.FromString(value)
    except DecodeError:
        raise Unusable("its bytes are no worker") from None
    if worker.id.encode() != member:
        raise Unusable(f"the worker calls itself {worker.id!r}")
    for fault in faults(worker):
        raise Unusable(fault)
    return worker


def kept_part(worker: Worker) -> bytes:
    """Serialize the fields of a worker that outlive its lease."""
    kept = Worker(id=worker.id, assignment=worker.assignment, role_change=worker.role_change)
    return kept.SerializeToString(deterministic=True)


def read_kept(value: bytes | None) -> Worker | None:
    """Parse the kept part of a worker; None if it is missing or damaged."""
    try:
        return Worker.FromString(value) if value and len(value) <= MAX_WORKER_BYTES else None
    except DecodeError:
        return None


def faults(worker: Worker) -> Iterator[str]:
    """Yield each fault of a worker in a few words; yield nothing for a usable one."""
    if not _ID.fullmatch(worker.id):
        yield f"id {worker.id[:80]!r} is no name of a process"
    address = _ADDRESS.fullmatch(worker.address)
    if not address or not 1 <= int(address[1]) <= 65_535:
        yield f"address {worker.address[:80]!r} is no host:port"
    if out_of_range := fault_of(worker, worker.ByteSize()):
        yield f"{out_of_range} is out of its range"
    assignment, can = worker.assignment, worker.capabilities
    for name, number, known in (
        ("role", assignment.role, Role.values()),
        ("state", worker.state, WorkerState.values()),
        ("first token", can.first_token, FirstToken.values()),
    ):
        if number not in known:
            yield f"{name} {number} is unknown here"
    least, most = PEAKS_PER_S
    for name in ("peak_flops_per_s", "peak_bytes_per_s"):
        peak = getattr(can.compute, name)
        if peak and not (math.isfinite(peak) and least <= peak <= most):
            yield f"{name} {peak:g}"


SOCKET_TIMEOUT_MS = 500
CALL_TIMEOUT_S = 1.5
MAX_PRUNED = 1000
"""The maximum number of dead ids that one list removes; the next list continues."""
MAX_REMEMBERED = 1024
"""The number of skipped values remembered as logged. Beyond it, the value seen least recently counts as new."""
SHOWN_BYTES = 80
"""The bytes of a skipped id that are logged."""

T = TypeVar("T")

# Incarnations are 20 digits, so that comparing text compares numbers: Lua's own are not exact beyond 2**53. A key of
# another type must be foreign, and would fail every command forever.
_OWN = """
local function own(key, kind)
  local held = redis.call('TYPE', key).ok
  if held ~= kind and held ~= 'none' then redis.call('DEL', key) end
end
own(KEYS[1], 'hash')
own(KEYS[2], 'set')
"""
_ANNOUNCE = f"""{_OWN}
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'worker')
if held[1] and held[1] > ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'worker', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
if held[2] ~= ARGV[3] then redis.call('PUBLISH', KEYS[3], ARGV[1]) end
return 1
"""
_WITHDRAW = f"""{_OWN}
local held = redis.call('HGET', KEYS[1], 'incarnation')
if held and held > ARGV[2] then return 0 end
if redis.call('DEL', KEYS[1]) + redis.call('SREM', KEYS[2], ARGV[1]) > 0 then
  redis.call('PUBLISH', KEYS[3], ARGV[1])
end
return 1
"""
# The id is removed only while its lease is missing: the worker may have returned since the list was read.
_PRUNE = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
"""


_bounded = partial(in_time, timeout_s=CALL_TIMEOUT_S, down=RegistryDown)


class RedisRegistry:
    """A Registry over Redis 6.2 or later. An older incarnation never replaces a newer one's registration.

    It consists of a lease key for each worker, a set of their ids, and a channel that announces changes.
    """

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._announce = self._redis.register_script(_ANNOUNCE)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._prune = self._redis.register_script(_PRUNE)
        self._skipped = _Skipped()

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        value = worker.SerializeToString(deterministic=True)
        lease = (worker.id, f"{worker.incarnation:020d}", value, lease_ms)
        await _bounded(self._announce(keys=self._keys(worker.id), args=lease))

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        args = [worker_id, f"{incarnation:020d}"]
        await _bounded(self._withdraw(keys=self._keys(worker_id), args=args))

    async def keep_role(self, worker: Worker, *, keep_ms: int) -> None:
        key = keys.kept_role(self._cluster, worker.id)
        if keep_ms:
            await _bounded(self._redis.set(key, kept_part(worker), px=keep_ms))
        else:
            await _bounded(self._redis.delete(key))

    async def kept_role(self, worker_id: str) -> Worker | None:
        value: Any = await _bounded(self._redis.get(keys.kept_role(self._cluster, worker_id)))
        return read_kept(value if isinstance(value, bytes) else None)  # a foreign key may be of another type

    async def workers(self) -> list[Worker]:
        """Return the workers with a valid lease, sorted by id, in two round trips and a third if some are dead.

        Other values are skipped, logged and counted.
        """
        return await _bounded(self._read())

    def stats(self) -> RegistryStats:
        return RegistryStats(self._skipped.total, self._skipped.last)

    async def watch(self, *, poll_ms: int = 1000) -> AsyncGenerator[list[Worker], None]:
        channel, away = keys.worker_changes(self._cluster), "registry is away"
        watching = watch_channel(self._redis, channel, self.workers, poll_ms=poll_ms, down=RegistryDown, away=away)
        async with aclosing(watching) as lists:
            async for workers in lists:
                yield workers

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, worker_id: str) -> list[str]:
        return [
            keys.worker(self._cluster, worker_id),
            keys.workers(self._cluster),
            keys.worker_changes(self._cluster),
        ]

    async def _read(self) -> list[Worker]:
        reply: Any = await self._redis.smembers(keys.workers(self._cluster))
        members: list[bytes] = sorted(reply)
        if not members:
            self._skipped.last = 0
            return []
        reads = self._redis.pipeline(transaction=False)
        for member in members:
            reads.hget(self._lease(member), "worker")
        values: list[Any] = await reads.execute(raise_on_error=False)
        found: list[Worker] = []
        dead: list[bytes] = []
        skipped = 0
        for member, value in zip(members, values, strict=True):
            if value is None:
                dead.append(member)
                continue
            try:
                found.append(read_worker(member, _bytes(value)))
            except Unusable as error:
                skipped += 1
                self._skipped.take(member, value, str(error))
        self._skipped.last = skipped
        await self._drop(dead[:MAX_PRUNED])
        return found

    async def _drop(self, dead: list[bytes]) -> None:
        # One round trip over one connection for all of them.
        if dead:
            prunes = self._redis.pipeline(transaction=False)
            for member in dead:
                await self._prune(keys=[self._lease(member), keys.workers(self._cluster)], args=[member], client=prunes)
            await prunes.execute()

    def _lease(self, member: bytes) -> bytes:
        """Return the lease key of a member, which may be any bytes."""
        return keys.worker(self._cluster, "").encode() + member


def _bytes(value: Any) -> bytes:
    """Return the value read. Raise Unusable for a key of another type, and any other error of Redis."""
    if is_wrong_type(value):
        raise Unusable("its key is no hash")
    if isinstance(value, Exception):
        raise value
    return bytes(value)


class _Skipped:
    """The values that were not workers. Each is logged and counted once while it is remembered."""

    def __init__(self) -> None:
        self.total = 0
        self.last = 0
        """The number of skipped values in the last list."""
        self._known: OrderedDict[int, None] = OrderedDict()

    def take(self, member: bytes, value: Any, why: str) -> None:
        held = value if isinstance(value, bytes) else str(value).encode()
        which = xxhash.xxh3_64_intdigest(b"%d:%b%b" % (len(member), member, held))
        known = which in self._known
        put_newest(self._known, which, None, MAX_REMEMBERED)
        if known:
            return
        self.total += 1
        log.warning("registry entry is not a worker", id=repr(member[:SHOWN_BYTES]), why=why)
