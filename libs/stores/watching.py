"""Watches of values in Redis, which are read again at every pushed change and at least once a period."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from libs.runtime.backoff import Backoff
from libs.runtime.redis import in_time

log = structlog.get_logger()

SUBSCRIBE_TIMEOUT_S: Final = 1.5
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
MAX_COALESCED_CHANGES: Final = 1_000
"""The maximum number of pushed changes that are combined into one value."""

T = TypeVar("T")


async def watch_channel(
    redis: Redis,
    channel: str,
    read: Callable[[], Awaitable[T]],
    *,
    poll_ms: int,
    down: type[Exception],
    away: str,
) -> AsyncGenerator[T, None]:
    """Yield the result of `read` now, after every change pushed on `channel`, and at least every `poll_ms`.

    Continue through outages, in which `read` raises `down`. The first failure of each is logged as `away`.
    """
    backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
    while True:
        try:
            async with aclosing(_watch_once(redis, channel, read, poll_ms, down)) as values:
                async for value in values:
                    backoff.reset()
                    yield value
        except down as error:
            wait_s = backoff.next_s()
            _stop_if_cancelled()
            if backoff.failures == 1:
                log.warning(away, error=str(error))
            await asyncio.sleep(wait_s)


async def _watch_once(
    redis: Redis, channel: str, read: Callable[[], Awaitable[T]], poll_ms: int, down: type[Exception]
) -> AsyncGenerator[T, None]:
    """Yield values over one connection until it fails with `down`."""
    changes = redis.pubsub()
    try:
        # Confirmed before the first value is read, so that no change falls between the two.
        await in_time(_subscribe(changes, channel), SUBSCRIBE_TIMEOUT_S, down)
        while True:
            yield await read()
            await _wait_for_change(changes, poll_ms / 1000, down)
            _stop_if_cancelled()
            subscribed: Any = changes.connection
            if subscribed is not None and subscribed.should_reconnect():
                raise down("the primary has moved")
    finally:
        await changes.aclose()  # type: ignore[no-untyped-call]


async def _subscribe(changes: PubSub, channel: str) -> None:
    await changes.subscribe(channel)
    while await changes.get_message(timeout=SUBSCRIBE_TIMEOUT_S) is None:
        pass  # bounded by `in_time`


async def _wait_for_change(changes: PubSub, timeout_s: float, down: type[Exception]) -> None:
    """Wait for a pushed change, at most `timeout_s`. Changes that arrive together count as one.

    A subscription that redis-py renewed on a new connection counts as a change, since some may have been missed.
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
        raise down(str(error)) from error


def _stop_if_cancelled() -> None:
    # Restores a lost cancellation. asyncio.timeout, used in every read of redis-py, swallows one that was requested
    # just before it was entered and coincides with its own expiry, and raises TimeoutError instead.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
