"""Redis connections on which no call outlasts a bound, whatever state the server is in."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

T = TypeVar("T")

MAX_CONNECTIONS = 16
# A pooled connection may have died with the last server; the first failure only reveals that.
STALE_RETRIES = 1


def is_wrong_type(answer: Any) -> bool:
    """Return whether a command failed because its key has another type, which means that Redis is well and the key is
    wrong.
    """
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def make_redis(url: str, *, timeout_ms: float) -> "Redis":
    """Return a client of `url` (binary replies) whose connects, sends and reads each end within `timeout_ms`."""
    timeout_s = timeout_ms / 1000
    client: Redis = Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), STALE_RETRIES, supported_errors=(RedisConnectionError,)),
        decode_responses=False,
    )
    return client


async def in_time(call: Awaitable[T], timeout_s: float, down: type[Exception]) -> T:
    """Return the call's result. Raise `down` if Redis does not answer within `timeout_s`, whatever the cause."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except (RedisError, OSError, TimeoutError) as error:
        raise down(str(error) or "no answer in time") from error
