"""Redis connections on which no call outlasts a bound, regardless of the state of the server."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from libs.contracts.errors import StartupError
from libs.runtime.sentinel import EXAMPLE, SCHEMES, is_sentinel_url, read_sentinel_url, sentinel_pool

T = TypeVar("T")

MAX_CONNECTIONS = 16
# A pooled connection may have died with the last server; the first failure only reveals that.
STALE_RETRIES = 1
FIRST_ANSWER_S = 1.0
"""The longest time for which a start waits for an answer of Redis."""
UNESCAPED = "the password or the port is not valid: in a password write / as %2F, ? as %3F, # as %23 and @ as %40"
_SECRETS = re.compile(r"(?<=://).*(?=@)|(?<=password=)[^&]*")


def is_wrong_type(answer: Any) -> bool:
    """Return whether a command failed because its key has another type, which means that Redis is well and the key is
    wrong.
    """
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def make_redis(url: str, *, timeout_ms: float) -> "Redis":
    """Return a client of `url` (binary replies) whose connects, sends and reads each end within `timeout_ms`.

    With redis+sentinel:// the client follows the primary that the sentinels name.
    """
    timeout_s = timeout_ms / 1000
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "max_connections": MAX_CONNECTIONS,
        "retry": Retry(NoBackoff(), STALE_RETRIES, supported_errors=(RedisConnectionError,)),
        "decode_responses": False,
    }
    if is_sentinel_url(url):
        return Redis.from_pool(sentinel_pool(read_sentinel_url(url), timeout_ms=timeout_ms, **options))
    client: Redis = Redis.from_url(url, **options)
    return client


def check_url(url: str) -> None:
    """Raise ValueError if the URL of a Redis is invalid. Its text holds no secret."""
    scheme = url.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix", *SCHEMES):
        raise ValueError(f"needs redis://HOST:6379/0, rediss://HOST, unix://PATH, or {EXAMPLE}")
    try:
        pool: Any = make_redis(url, timeout_ms=1).connection_pool
        pool.make_connection()  # without connecting
    except TypeError as error:
        option = str(error).rpartition("argument ")[2]
        raise ValueError(f"{option} is not an option of a connection to Redis: remove it") from None
    except ValueError as error:
        # The error of urllib contains the supposed port, which is the beginning of such a password.
        if "Port " in str(error) and "@" in url:
            raise ValueError(UNESCAPED) from None
        raise


async def refuse_cluster(url: str) -> None:
    """Raise StartupError if the server is a node of a Redis Cluster; one that does not answer may be any server.

    Scripts and reads of several keys span slots there, so that registering workers and the planner's lead would fail.
    """
    redis = make_redis(url, timeout_ms=FIRST_ANSWER_S * 1000)
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            found = await redis.info("cluster")
    except (RedisError, OSError, TimeoutError):
        return
    finally:
        await redis.aclose()
    if found.get("cluster_enabled"):
        raise StartupError(
            f"{shown_url(url)} is a Redis Cluster, which cannot hold Fulcrum's keys: name one Redis, or {EXAMPLE}"
        )


def shown_url(url: str) -> str:
    """Return the URL without its secrets."""
    return _SECRETS.sub("***", url)


async def in_time(call: Awaitable[T], timeout_s: float, down: type[Exception]) -> T:
    """Return the call's result. Raise `down` if Redis does not answer within `timeout_s` for any reason."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except (RedisError, OSError, TimeoutError) as error:
        raise down(str(error) or "no answer in time") from error
