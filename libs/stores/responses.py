"""Stored responses, which later requests of the same tenant can continue: the port, in memory, and in Redis.

In Redis each tenant has a hash of values, a sorted set of their expiry times by Redis's clock, and the sum of their
sizes. With one hash per tenant, its bounds are enforced in one step and its entries expire together.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from libs.contracts import keys
from libs.policy.newest import put_newest
from libs.runtime.redis import in_time, make_redis

MAX_RESPONSES: Final = 1_000
"""The maximum number of responses of one tenant; the oldest make room."""
MAX_TENANT_BYTES: Final = 64 * 1024**2
"""The maximum number of bytes of one tenant's responses; the oldest make room."""
MAX_RESPONSE_BYTES: Final = 8 * 1024**2
"""The maximum number of bytes of a response including the preceding conversation. Larger ones are not stored."""


class ResponsesDown(Exception):
    """The store does not respond in time."""


class ResponseStore(Protocol):
    """Response values by tenant and id. Methods raise ResponsesDown."""

    async def keep(self, tenant: str, response_id: str, value: bytes, keep_s: int) -> bool:
        """Store a value for `keep_s` within the bounds above, and return False if it is too large."""
        ...

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the value, or None if this tenant has none with that id or it has expired."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value and return whether it existed."""
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


MAX_TENANTS = 256
"""The maximum number of tenants with responses at a time; those of the least recently active one make room."""


@dataclass(slots=True)
class _TenantResponses:
    values: OrderedDict[str, tuple[bytes, float]] = field(default_factory=OrderedDict)
    """Value and expiry time by response id, oldest first."""
    size_bytes: int = 0

    def drop(self, response_id: str) -> bool:
        found = self.values.pop(response_id, None)
        if found is not None:
            self.size_bytes -= len(found[0])
        return found is not None


class MemoryResponses:
    """A ResponseStore that lasts as long as its process."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._tenants: OrderedDict[str, _TenantResponses] = OrderedDict()

    async def keep(self, tenant: str, response_id: str, value: bytes, keep_s: int) -> bool:
        if len(value) > MAX_RESPONSE_BYTES:
            return False
        kept = self._tenants.get(tenant, _TenantResponses())
        put_newest(self._tenants, tenant, kept, MAX_TENANTS)
        now_s = self._now_s()
        for over in [each for each, (_, ends_s) in kept.values.items() if ends_s <= now_s]:
            kept.drop(over)
        kept.drop(response_id)
        while kept.values and (len(kept.values) >= MAX_RESPONSES or kept.size_bytes + len(value) > MAX_TENANT_BYTES):
            kept.drop(next(iter(kept.values)))
        kept.values[response_id] = value, now_s + keep_s
        kept.size_bytes += len(value)
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        kept = self._tenants.get(tenant)
        value, ends_s = kept.values.get(response_id, (None, 0.0)) if kept else (None, 0.0)
        return value if ends_s > self._now_s() else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        stands = await self.get(tenant, response_id) is not None
        if stands:
            self._tenants[tenant].drop(response_id)
        return stands

    async def close(self) -> None:
        # There is no connection to close.
        ...


SOCKET_TIMEOUT_MS: Final = 500
# An answer may wait this long for the store.
CALL_TIMEOUT_S: Final = 1.0

_START: Final = """
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local function drop(id)
  local size = redis.call('HSTRLEN', KEYS[1], id)
  redis.call('HDEL', KEYS[1], id)
  if size > 0 then redis.call('DECRBY', KEYS[3], size) end
  return redis.call('ZREM', KEYS[2], id)
end
"""
# A key of another type must be foreign, and would prevent all later responses from being stored. Values without expiry
# times, and expiry times without values, are useless. A size that is not a number is summed up again.
_KEEP: Final = (
    _START
    + """
-- Redis asks for room before a script's first write alone, and not where that only removes.
local room = redis.pcall('INCRBY', KEYS[3], 0)
if type(room) == 'table' and string.find(room.err, 'OOM') then return room end
local function foreign(key, kind)
  local held = redis.call('TYPE', key).ok
  return held ~= kind and held ~= 'none'
end
if foreign(KEYS[1], 'hash') or foreign(KEYS[2], 'zset') then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) end
if foreign(KEYS[3], 'string') or not string.match(redis.call('GET', KEYS[3]) or '0', '^%d+$') then
  local sum = 0
  for _, each in ipairs(redis.call('HKEYS', KEYS[1])) do sum = sum + redis.call('HSTRLEN', KEYS[1], each) end
  redis.call('SET', KEYS[3], sum)
end
local id, value, keep_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
for _, each in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms)) do drop(each) end
drop(id)
while true do
  local count, size = redis.call('ZCARD', KEYS[2]), tonumber(redis.call('GET', KEYS[3]) or '0')
  if count == 0 then redis.call('DEL', KEYS[1], KEYS[3]) end
  if count == 0 or (count < tonumber(ARGV[4]) and size + #value <= tonumber(ARGV[5])) then break end
  drop(redis.call('ZRANGE', KEYS[2], 0, 0)[1])
end
redis.call('HSET', KEYS[1], id, value)
redis.call('ZADD', KEYS[2], now_ms + keep_ms, id)
redis.call('INCRBY', KEYS[3], #value)
for at = 1, 3 do
  if redis.call('PTTL', KEYS[at]) < keep_ms then redis.call('PEXPIRE', KEYS[at], keep_ms) end
end
return 1
"""
)
_GET: Final = (
    _START
    + """
local ends_ms = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not ends_ms or tonumber(ends_ms) <= now_ms then return false end
return redis.call('HGET', KEYS[1], ARGV[1])
"""
)
_DELETE: Final = (
    _START
    + """
local ends_ms = redis.call('ZSCORE', KEYS[2], ARGV[1])
drop(ARGV[1])
return (ends_ms and tonumber(ends_ms) > now_ms) and 1 or 0
"""
)


_bounded = partial(in_time, timeout_s=CALL_TIMEOUT_S, down=ResponsesDown)


class RedisResponses:
    """A ResponseStore over Redis 6.2 or later, each of whose calls is one round trip."""

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._keep = self._redis.register_script(_KEEP)
        self._get = self._redis.register_script(_GET)
        self._delete = self._redis.register_script(_DELETE)

    def _keys(self, tenant: str) -> list[str]:
        return [keys.responses(self._cluster, tenant, part) for part in ("values", "ends", "bytes")]

    async def keep(self, tenant: str, response_id: str, value: bytes, keep_s: int) -> bool:
        if len(value) > MAX_RESPONSE_BYTES:
            return False
        args: list[Any] = [response_id, value, keep_s * 1000, MAX_RESPONSES, MAX_TENANT_BYTES]
        await _bounded(self._keep(keys=self._keys(tenant), args=args))
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        # The value expires by Redis's clock.
        found: bytes | None = await _bounded(self._get(keys=self._keys(tenant), args=[response_id]))
        return found

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await _bounded(self._delete(keys=self._keys(tenant), args=[response_id])))

    async def close(self) -> None:
        await self._redis.aclose()
