"""Keys in Redis, for gateways on several machines. The keys and their version are changed in one transaction."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from redis.exceptions import RedisError, WatchError

from libs.contracts import keys
from libs.contracts.errors import StoreUnavailable
from libs.keys.book import KeySet, StoredKeySet, read_book
from libs.runtime.redis import make_redis

LOAD_TIMEOUT_S: Final = 1.0
"""The timeout of one read. Until the next read, the last known keys apply."""
# Longer than the timeout of a read, because a person waits for the change and would only retry.
CHANGE_TIMEOUT_S: Final = 5.0
MAX_ATTEMPTS: Final = 32
"""The maximum number of attempts at a change while other processes change the keys."""
_BOOK, _VERSION = "book", "version"
ABSENT: Final = "0"


class RedisKeys:
    """A `KeyStore` in Redis 6.2 or later."""

    def __init__(self, url: str, cluster: str) -> None:
        self._name = keys.api_keys(cluster)
        self._redis = make_redis(url, timeout_ms=round(CHANGE_TIMEOUT_S * 1e3))

    async def load(self, known: str = "") -> StoredKeySet | None:
        # If nothing has changed, this needs one round trip for a few bytes.
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                version = _version(await self._redis.hget(self._name, _VERSION))
                if version == known:
                    return None
                text, version_then = await self._redis.hmget(self._name, _BOOK, _VERSION)
                return StoredKeySet(_version(version_then), _book(text))
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def change(self, edit: Callable[[KeySet], KeySet]) -> KeySet:
        """Change the keys. The change is attempted again after a concurrent change."""
        try:
            for _attempt in range(MAX_ATTEMPTS):
                async with asyncio.timeout(CHANGE_TIMEOUT_S), self._redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(self._name)
                    book = edit(_book(await pipe.hget(self._name, _BOOK)))
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.hset(self._name, _BOOK, msgspec.json.encode(book))
                    pipe.hincrby(self._name, _VERSION, 1)
                    try:
                        await pipe.execute()
                    except WatchError:
                        continue
                    return book
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error
        raise StoreUnavailable(f"others changed the keys {MAX_ATTEMPTS} times in the meantime: try again")

    async def close(self) -> None:
        await self._redis.aclose()


def _version(found: Any) -> str:
    return found.decode("latin-1") if found is not None else ABSENT


def _book(text: Any) -> KeySet:
    if text is None:
        return KeySet()
    try:
        return read_book(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"the keys in Redis cannot be read ({error})") from error


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"Redis, which holds the keys, does not answer ({error or type(error).__name__})")
