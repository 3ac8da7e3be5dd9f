"""The model catalogue in Redis.

It consists of hashes of entries and load times, the planner's outlooks under a lease, a lease key for each
gateway's use, and two channels that announce changes.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import structlog

from libs.contracts import keys
from libs.runtime.redis import in_time, make_redis
from libs.stores.catalogue.entry import LoadTimes, ModelEntry, ModelOutlook, ModelUse
from libs.stores.catalogue.port import Catalogued, CatalogueDown, Uses
from libs.stores.watching import watch_channel

log = structlog.get_logger()

SOCKET_TIMEOUT_MS: Final = 500
CALL_TIMEOUT_S: Final = 1.5

T = TypeVar("T")
_OUTLOOKS: Final = msgspec.json.Decoder(dict[str, ModelOutlook])
_USES: Final = msgspec.json.Decoder(dict[str, ModelUse])
_ENTRY: Final = msgspec.json.Decoder(ModelEntry)
_TIMES: Final = msgspec.json.Decoder(LoadTimes)
_TELL: Final = """
local held = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if held ~= ARGV[1] then redis.call('PUBLISH', KEYS[2], 'outlook') end
return 1
"""
_USE: Final = """
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
redis.call('PUBLISH', KEYS[3], ARGV[3])
return 1
"""
# The gateway may have returned since the list was read.
_PRUNE: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
"""


_bounded = partial(in_time, timeout_s=CALL_TIMEOUT_S, down=CatalogueDown)


class RedisCatalogue:
    """A ModelCatalogue over Redis 6.2 or later."""

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._tell = self._redis.register_script(_TELL)
        self._use = self._redis.register_script(_USE)
        self._prune = self._redis.register_script(_PRUNE)

    async def put(self, entry: ModelEntry) -> None:
        await self._change(lambda pipe: pipe.hset(keys.models(self._cluster), entry.name, msgspec.json.encode(entry)))

    async def remove(self, name: str) -> bool:
        def act(pipe: Any) -> None:
            pipe.hdel(keys.models(self._cluster), name)
            pipe.hdel(keys.model_times(self._cluster), name)

        return bool((await self._change(act))[0])

    async def measured(self, name: str, times: LoadTimes) -> None:
        await self._change(lambda pipe: pipe.hset(keys.model_times(self._cluster), name, msgspec.json.encode(times)))

    async def read(self) -> Catalogued:
        # All in one round trip.
        reads = self._redis.pipeline(transaction=False)
        reads.hgetall(keys.models(self._cluster))
        reads.hgetall(keys.model_times(self._cluster))
        reads.get(keys.model_outlook(self._cluster))
        entries, times, outlooks = await _bounded(reads.execute())
        return Catalogued(
            {name: entry for name, entry in _decoded(_ENTRY, entries).items() if entry.name == name},
            _decoded(_TIMES, times),
            _outlooks(outlooks),
        )

    async def watch(self, *, poll_ms: int = 2_000) -> AsyncGenerator[Catalogued, None]:
        async with aclosing(self._watch(keys.model_changes(self._cluster), self.read, poll_ms)) as found:
            async for each in found:
                yield each

    async def tell(self, outlooks: Mapping[str, ModelOutlook], *, lease_ms: int) -> None:
        value = msgspec.json.encode(dict(sorted(outlooks.items())))
        names = [keys.model_outlook(self._cluster), keys.model_changes(self._cluster)]
        await _bounded(self._tell(keys=names, args=[value, lease_ms]))

    async def use(self, gateway_id: str, uses: Mapping[str, ModelUse], *, lease_ms: int) -> None:
        names = [self._use_key(gateway_id), keys.model_gateways(self._cluster), keys.model_uses(self._cluster)]
        await _bounded(self._use(keys=names, args=[msgspec.json.encode(uses), lease_ms, gateway_id]))

    async def uses(self) -> Uses:
        """Return the uses in two round trips, removing the ids of gateways that are gone."""
        return await _bounded(self._read_uses())

    async def watch_uses(self, *, poll_ms: int = 1_000) -> AsyncGenerator[Uses, None]:
        async with aclosing(self._watch(keys.model_uses(self._cluster), self.uses, poll_ms)) as found:
            async for each in found:
                yield each

    async def close(self) -> None:
        await self._redis.aclose()

    def _use_key(self, gateway_id: str) -> str:
        return keys.model_use(self._cluster, gateway_id)

    async def _read_uses(self) -> Uses:
        members: Any = await self._redis.smembers(keys.model_gateways(self._cluster))
        gateways = sorted(member.decode(errors="replace") for member in members)
        if not gateways:
            return {}
        values: list[Any] = await self._redis.mget([self._use_key(each) for each in gateways])
        found = {}
        for gateway, value in zip(gateways, values, strict=True):
            if value is None:
                names = [self._use_key(gateway), keys.model_gateways(self._cluster)]
                await self._prune(keys=names, args=[gateway])
            elif (uses := _one(_USES, value)) is not None:
                found[gateway] = uses
        return found

    async def _change(self, act: Callable[[Any], Any]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=True)
        act(pipe)
        pipe.publish(keys.model_changes(self._cluster), "entry")
        return await _bounded(pipe.execute())

    def _watch(self, channel: str, read: Callable[[], Awaitable[T]], poll_ms: int) -> AsyncGenerator[T, None]:
        away = "model catalogue is away"
        return watch_channel(self._redis, channel, read, poll_ms=poll_ms, down=CatalogueDown, away=away)


def _decoded(decoder: "msgspec.json.Decoder[T]", values: Mapping[bytes, bytes]) -> dict[str, T]:
    found = {name.decode(errors="replace"): _one(decoder, value) for name, value in values.items()}
    return {name: value for name, value in sorted(found.items()) if value is not None}


def _outlooks(value: bytes | None) -> dict[str, ModelOutlook]:
    return _one(_OUTLOOKS, value) or {}


def _one(decoder: "msgspec.json.Decoder[T]", value: bytes | None) -> T | None:
    """Decode a value; return None if it is missing or malformed."""
    try:
        return decoder.decode(value) if value is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
