"""The planner's mode in Redis."""

import asyncio
from typing import Any

import structlog
from redis.exceptions import RedisError

from libs.contracts import keys
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Mode
from libs.runtime.redis import make_redis
from services.planner.mode import MODES, mode_word

log = structlog.get_logger()

TIMEOUT_MS = 500
CALL_TIMEOUT_S = 1.5


class RedisModeStore:
    """ModeStore in Redis."""

    def __init__(self, url: str, cluster: str) -> None:
        self._redis = make_redis(url, timeout_ms=TIMEOUT_MS)
        self._key = keys.planner_mode(cluster)

    async def load(self) -> Mode | None:
        """What was last kept; None when nothing was, or Redis is away."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                word: Any = await self._redis.get(self._key)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("the planner's mode cannot be read: that of its settings holds", error=str(error))
            return None
        return MODES.get(word.decode(errors="replace")) if word else None

    async def keep(self, mode: Mode) -> bool:
        """Remember a mode; whether that worked."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._redis.set(self._key, mode_word(mode))
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("the planner's mode could not be kept", error=str(error))
            return False
        return True

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self._redis.aclose()
