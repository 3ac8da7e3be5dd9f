"""The planner's persistent state in Redis: its mode, its limits and the leader lease."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Final

import structlog
from redis.exceptions import RedisError, ResponseError

from libs.contracts import keys
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Mode
from libs.runtime.redis import make_redis
from services.planner.kept import LEASE_MS, MODES, Lead, StoredPlannerSettings, mode_word

log = structlog.get_logger()

TIMEOUT_MS: Final = 500
CALL_TIMEOUT_S: Final = 1.5
LEAD_TIMEOUT_S: Final = LEASE_MS / 4000
# Terms follow the clock of Redis. A Redis primary that has missed the last term, such as a replica that lagged,
# therefore grants no lower one.
_LEAD: Final = """
local held = redis.call('get', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
local known = redis.pcall('get', KEYS[2])
local term = type(known) == 'string' and tonumber(known) or 0
if not (term > 0 and term < 2^52) then term = 0 end
if not held or term == 0 then
  local now = redis.call('time')
  term = math.max(term + 1, now[1] * 1000 + math.floor(now[2] / 1000))
  redis.call('set', KEYS[2], string.format('%.0f', term))
end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return term
"""


class RedisPlannerStore:
    def __init__(self, url: str, cluster: str) -> None:
        self._redis = make_redis(url, timeout_ms=TIMEOUT_MS)
        self._mode_key = keys.planner_mode(cluster)
        self._limits_key = keys.planner_limits(cluster)
        self._cluster = cluster
        self._lead_key, self._term_key = keys.planner_lead(cluster), keys.planner_term(cluster)
        self._lead = self._redis.register_script(_LEAD)
        self.lead_fault = ""
        self.term = 0

    async def load(self) -> StoredPlannerSettings | None:
        try:
            mode, limits = await _within(self._redis.mget(self._mode_key, self._limits_key))
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("mode and limits cannot be read from Redis: waiting for them", error=str(error))
            return None
        return StoredPlannerSettings(MODES.get(_text(mode)) if mode else None, _text(limits) if limits else None)

    async def keep(self, mode: Mode) -> bool:
        return await self._write(self._mode_key, mode_word(mode), "the planner's mode could not be kept")

    async def keep_limits(self, written: str) -> bool:
        return await self._write(self._limits_key, written, "the planner's limits could not be kept")

    async def recall(self, what: str) -> str | None:
        try:
            written = await _within(self._redis.get(keys.planner_memory(self._cluster, what)))
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("the planner's memory cannot be read", what=what, error=str(error))
            return None
        return _text(written) if written else None

    async def remember(self, what: str, written: str) -> bool:
        return await self._write(keys.planner_memory(self._cluster, what), written, f"{what} could not be kept")

    async def lead(self, who: str) -> Lead:
        """Acquire or renew the lead for `LEASE_MS`, unless another planner holds it."""
        try:
            async with asyncio.timeout(LEAD_TIMEOUT_S):
                taken = int(await self._lead(keys=[self._lead_key, self._term_key], args=[who, LEASE_MS]))
        except ResponseError as error:
            # The key may have another type, for example. Then nobody can acquire the lead, and the key must not be
            # deleted, because it may belong to somebody else.
            remedy = ": delete the key if it is no lease" if "WRONGTYPE" in str(error) else ""
            self.lead_fault = f"Redis refuses the key {self._lead_key} ({error}){remedy}"
            return Lead.UNKNOWN
        except (RedisError, OSError, TimeoutError):
            self.lead_fault = "Redis does not answer"
            return Lead.UNKNOWN
        self.lead_fault, self.term = "", taken or self.term
        return Lead.OURS if taken else Lead.ANOTHERS

    async def follow(self, who: str) -> None:
        """Release the lead if this planner holds it. If Redis is unreachable, the lease expires by itself."""
        try:
            if await _within(self._redis.get(self._lead_key)) == who.encode():
                await _within(self._redis.delete(self._lead_key))
        except (RedisError, OSError, TimeoutError) as error:
            log.info("the lead could not be released: it will expire", error=str(error))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _write(self, key: str, text: str, unkept: str) -> bool:
        try:
            await _within(self._redis.set(key, text))
        except (RedisError, OSError, TimeoutError) as error:
            log.warning(unkept, error=str(error))
            return False
        return True


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


async def _within(call: Awaitable[Any]) -> Any:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await call
