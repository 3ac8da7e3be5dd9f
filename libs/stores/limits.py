"""The combined use of tenants' limits by all gateways: the port, and the adapter to Redis, by its clock.

Each kind has a hash of slots, and concurrent requests have a hash of gateways. The arithmetic is that of
`libs.policy.gateway.usage`, where it is tested; here it runs in scripts that do not interleave.

Redis's clock may be set back. Values written for a time later than any possible one are moved to the latest
possible.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol

from libs.contracts import keys
from libs.policy.gateway.usage import DAY, MINUTE, WindowSlots
from libs.runtime.redis import in_time, make_redis

Kind = Literal["requests", "tokens", "gpu_ms"]
SPANS: Final[Mapping[Kind, WindowSlots]] = {"requests": MINUTE, "tokens": MINUTE, "gpu_ms": DAY}
"""The span over which each kind is limited."""


class LedgerDown(Exception):
    """The ledger does not respond in time. Whether it has counted the call is unknown."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The units granted, and the state of the limit afterwards."""

    granted: int
    left: int
    wait_s: float
    """The time until the minimum amount would fit; 0 if it was granted."""


class Ledger(Protocol):
    """The use of tenants' limits in the last minute or day, running requests, and gateways' reports about tenants.

    Methods raise LedgerDown.
    """

    async def take(self, tenant: str, kind: Kind, limit: int, *, want: int, least: int) -> Grant:
        """Use up to `want` units as far as the limit allows, or none if that is less than `least`."""
        ...

    async def add(self, tenant: str, kind: Kind, units: int) -> None:
        """Add units regardless of the limit. A negative number returns units."""
        ...

    async def hold(self, tenant: str, gateway_id: str, limit: int, *, running: int, want: int) -> int:
        """Reserve concurrent requests for the gateway for HOLD_S and return their number.

        It is `want` as far as there is room, and at least `running`.
        """
        ...

    async def beat(self, gateway_id: str) -> int:
        """Register the gateway as alive for HOLD_S, and return the number of live gateways."""
        ...

    async def exchange(self, gateway_id: str, report: bytes) -> Mapping[str, bytes]:
        """Publish this gateway's report on its tenants for REPORT_HOLD_S, and return the others' reports by gateway.

        An empty report publishes nothing. Reports that exceed MAX_REPORT_BYTES together with their gateway's name
        are dropped.
        """
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


HOLD_S = 5.0
"""The time after which a gateway loses reservations that it has not renewed."""
# A report that is not renewed for this long no longer counts. It must be short, since answers at other gateways give
# way to the reported tenants.
REPORT_HOLD_S = 1.0
# Fits about 5,000 tenants of one gateway.
MAX_REPORT_BYTES = 256 * 1024


SOCKET_TIMEOUT_MS: Final = 200
# Requests may wait this long for the ledger.
CALL_TIMEOUT_S: Final = 0.3

_WINDOW: Final = """
local now = redis.call('TIME')
local width = tonumber(ARGV[2])
local second = math.floor(tonumber(now[1]) / width)
local found, seconds, used = redis.call('HGETALL', KEYS[1]), {}, 0
for at = 1, #found, 2 do
  local own = tonumber(found[at])
  if own > second then
    redis.call('HDEL', KEYS[1], found[at])
    redis.call('HINCRBY', KEYS[1], second, found[at + 1])
    own = second
  end
  if own <= second - tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1], found[at])
  else
    seconds[#seconds + 1] = {own, tonumber(found[at + 1])}
    used = used + tonumber(found[at + 1])
  end
end
"""
_TAKE: Final = (
    _WINDOW
    + """
local limit, want, least = tonumber(ARGV[3]), tonumber(ARGV[4]), math.max(tonumber(ARGV[5]), 1)
local granted = math.min(want, limit - used)
if granted >= least then
  redis.call('HINCRBY', KEYS[1], second, granted)
  redis.call('EXPIRE', KEYS[1], ARGV[1] * width * 2)
  return {granted, limit - used - granted, '0'}
end
table.sort(seconds, function(one, other) return one[1] < other[1] end)
local short = used + least - limit
for _, each in ipairs(seconds) do
  short = short - each[2]
  if short <= 0 then
    local ends = (each[1] + tonumber(ARGV[1])) * width
    local wait = math.max(ends - tonumber(now[1]) - tonumber(now[2]) / 1e6, 0)
    return {0, limit - used, tostring(wait)}
  end
end
return {0, limit - used, tostring(ARGV[1] * width)}
"""
)
_ADD: Final = (
    _WINDOW
    + """
local units = tonumber(ARGV[3])
if units >= 0 then
  redis.call('HINCRBY', KEYS[1], second, units)
  redis.call('EXPIRE', KEYS[1], ARGV[1] * width * 2)
  return 1
end
table.sort(seconds, function(one, other) return one[1] > other[1] end)
for _, each in ipairs(seconds) do
  local back = math.min(-units, each[2])
  if back > 0 then redis.call('HINCRBY', KEYS[1], each[1], -back) end
  units = units + back
end
return 1
"""
)
# A count of more than seven digits is corrupt, and would use up the limit of all others.
_HOLD: Final = """
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local found, others = redis.call('HGETALL', KEYS[1]), 0
for at = 1, #found, 2 do
  local count, ends = string.match(found[at + 1], '^(%d+):(%d+)$')
  if not count or #count > 7 or tonumber(ends) <= now_ms then
    redis.call('HDEL', KEYS[1], found[at])
  elseif found[at] ~= ARGV[1] then
    others = others + tonumber(count)
    if tonumber(ends) > now_ms + tonumber(ARGV[5]) then
      redis.call('HSET', KEYS[1], found[at], count .. ':' .. (now_ms + tonumber(ARGV[5])))
    end
  end
end
local running, want = tonumber(ARGV[3]), tonumber(ARGV[4])
local held = math.max(running, math.min(want, tonumber(ARGV[2]) - others))
if held > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], held .. ':' .. (now_ms + tonumber(ARGV[5])))
  redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[5]) * 2)
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return held
"""
_BEAT: Final = """
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
local latest = now_ms + tonumber(ARGV[2])
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], latest, '+inf')) do
  redis.call('ZADD', KEYS[1], latest, name)
end
redis.call('ZADD', KEYS[1], latest, ARGV[1])
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[2]) * 2)
return redis.call('ZCARD', KEYS[1])
"""
_EXCHANGE: Final = """
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local latest, found, others = now_ms + tonumber(ARGV[3]), redis.call('HGETALL', KEYS[1]), {}
for at = 1, #found, 2 do
  local ends, report = string.match(found[at + 1], '^(%d+):(.*)$')
  local long = #found[at] + #found[at + 1] > tonumber(ARGV[4])
  if long or not ends or tonumber(ends) <= now_ms or tonumber(ends) > latest then
    redis.call('HDEL', KEYS[1], found[at])
  elseif found[at] ~= ARGV[1] then
    others[#others + 1] = found[at]
    others[#others + 1] = report
  end
end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], latest .. ':' .. ARGV[2])
  redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[3]) * 2)
end
return others
"""


_bounded = partial(in_time, timeout_s=CALL_TIMEOUT_S, down=LedgerDown)


def _cut(kind: Kind) -> tuple[int, int]:
    span = SPANS[kind]
    return span.slots, span.slot_s


class RedisLedger:
    """A Ledger over Redis 6.2 or later, each of whose calls is one round trip."""

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._take = self._redis.register_script(_TAKE)
        self._add = self._redis.register_script(_ADD)
        self._hold = self._redis.register_script(_HOLD)
        self._beat = self._redis.register_script(_BEAT)
        self._exchange = self._redis.register_script(_EXCHANGE)

    async def take(self, tenant: str, kind: Kind, limit: int, *, want: int, least: int) -> Grant:
        name = keys.limit_use(self._cluster, tenant, kind)
        granted, left, wait_s = await _bounded(self._take(keys=[name], args=[*_cut(kind), limit, want, least]))
        return Grant(int(granted), max(int(left), 0), float(wait_s))

    async def add(self, tenant: str, kind: Kind, units: int) -> None:
        """Add units. Negative ones are taken from the latest slots first."""
        await _bounded(self._add(keys=[keys.limit_use(self._cluster, tenant, kind)], args=[*_cut(kind), units]))

    async def hold(self, tenant: str, gateway_id: str, limit: int, *, running: int, want: int) -> int:
        # Reservations of other gateways remain until they expire.
        args: list[str | int] = [gateway_id, limit, running, want, round(HOLD_S * 1000)]
        return int(await _bounded(self._hold(keys=[keys.limit_open(self._cluster, tenant)], args=args)))

    async def beat(self, gateway_id: str) -> int:
        # The count includes this gateway.
        args: list[str | int] = [gateway_id, round(HOLD_S * 1000)]
        return int(await _bounded(self._beat(keys=[keys.limit_gateways(self._cluster)], args=args)))

    async def exchange(self, gateway_id: str, report: bytes) -> Mapping[str, bytes]:
        # Reports with an impossibly late end, from before the clock was set back, are dropped: new ones follow
        # soon.
        args: list[str | int | bytes] = [gateway_id, report, round(REPORT_HOLD_S * 1000), MAX_REPORT_BYTES]
        found = await _bounded(self._exchange(keys=[keys.tenant_places(self._cluster)], args=args))
        named = zip(found[::2], found[1::2], strict=True)
        return {bytes(name).decode(errors="replace"): bytes(each) for name, each in named}

    async def close(self) -> None:
        await self._redis.aclose()
