"""The model catalogue: the models, their use by gateways, and the planner's outlook; the port, and Redis.

The leading planner writes entries and outlooks. Each gateway writes its own use.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import structlog
from msgspec import Meta, Struct

from libs.contracts import keys
from libs.runtime.redis import in_time, make_redis
from libs.stores.watching import watch_channel

log = structlog.get_logger()

MAX_NAME_CHARS: Final = 200
MAX_RESERVATIONS: Final = 16
MAX_MODELS: Final = 2_000
DAY_MINUTES: Final = 1_440

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Minute = Annotated[int, Meta(ge=0, lt=DAY_MINUTES)]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]


class Reservation(Struct, frozen=True):
    """GPUs reserved for a model during a period of each day, in UTC."""

    gpus: Annotated[int, Meta(ge=1, le=65_536)]
    from_minute: Minute
    to_minute: Minute
    """The exclusive end. Equal to `from_minute` it means all day; a lower value means past midnight."""


class ModelEntry(Struct, frozen=True, omit_defaults=True):
    """A model, by the name used in requests."""

    name: Name
    source: str
    """A folder in the layout of Hugging Face, or of PEFT for an adapter, or builtin:sim."""
    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]
    floor: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """The minimum number of workers for the model, as far as there are enough."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Models of a higher priority are loaded first and evicted last."""
    ttft_ms: Milliseconds | None = None
    """The TTFT target of requests that have none; None for the gateway's default."""
    tpot_ms: Milliseconds | None = None
    pinned: bool = False
    """True if the model stays once it has been loaded, or is required by floor or reservation."""
    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=MAX_RESERVATIONS)] = ()
    parent: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    """The model on whose workers a LoRA adapter is loaded; empty for a base model."""


class LoadTimes(Struct, frozen=True, omit_defaults=True):
    """The seconds that loading the model took most recently; 0 if never measured."""

    load_s: float = 0.0
    """The time to load the weights from their source."""
    wake_s: float = 0.0
    """The time to load the weights from host memory."""


class ModelUse(Struct, frozen=True, omit_defaults=True):
    """One gateway's use of a model, as reported by the gateway."""

    arrivals: int = 0
    """The number of requests since the gateway started."""
    last_unix_ms: int = 0
    """The arrival of the latest request; 0 before the first."""
    waiting: int = 0
    """The number of requests that no worker has accepted yet."""
    waiting_since_unix_ms: int = 0
    in_flight: int = 0
    """The number of requests that have not ended, including waiting ones."""
    promised_unix_ms: int = 0
    """The time at which a client was asked to retry, when the model should be loaded; 0 if there was none."""
    lines_waiting: int = 0
    """The number of `waiting` requests that are lines of batch jobs."""
    lines_in_flight: int = 0
    """The number of `in_flight` requests that are lines of batch jobs."""


class ModelOutlook(Struct, frozen=True, omit_defaults=True):
    """The planner's expectations about a model, published for gateways."""

    state: str
    """One of serving, loading, asleep, host (in a worker's host memory), disk, failed."""
    wait_s: float = 0.0
    """The expected wait for the model of a request that arrives now."""
    ready_unix_ms: int = 0
    """The expected end of a load in progress."""
    error: str = ""
    """The reason why the last load failed, as long as it is not retried."""


Uses = Mapping[str, Mapping[str, ModelUse]]
"""Uses by gateway id, then by model name."""


@dataclass(frozen=True, slots=True)
class Catalogued:
    """A snapshot of the catalogue, whose mappings are keyed by model name."""

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    times: Mapping[str, LoadTimes] = field(default_factory=dict)
    """The times of the models that have been loaded."""
    outlooks: Mapping[str, ModelOutlook] = field(default_factory=dict)
    """The planner's outlooks; empty if no planner has published any recently."""
    edits: int = 0
    """The number of changes of entries since the store was last emptied."""

    @property
    def is_lost(self) -> bool:
        """True if nothing was ever stored, or the store was emptied; false if the last model was removed."""
        return not self.entries and not self.edits


class CatalogueDown(Exception):
    """The store does not respond; callers continue with their last data."""


class ModelCatalogue(Protocol):
    """The catalogue of models. All but `watch` and `watch_uses` raise CatalogueDown while the store is away."""

    async def put(self, *entries: ModelEntry) -> None:
        """Add models, or replace those of the same name, in one step."""
        ...

    async def remove(self, name: str) -> bool:
        """Remove a model with its load times, and return whether it existed."""
        ...

    async def measured(self, name: str, times: LoadTimes) -> None: ...

    async def read(self) -> Catalogued:
        """Return the whole catalogue without malformed values."""
        ...

    def watch(self, *, poll_ms: int = 2_000) -> AsyncIterator[Catalogued]:
        """Yield the catalogue now, after every change of entries or outlooks, and at least every `poll_ms`.

        Continue through outages.
        """
        ...

    async def publish_outlooks(self, outlooks: Mapping[str, ModelOutlook], *, lease_ms: int) -> None:
        """Publish the planner's outlooks until the lease ends. Watchers are notified of differences."""
        ...

    async def use(self, gateway_id: str, uses: Mapping[str, ModelUse], *, lease_ms: int) -> None:
        """Replace the uses reported by one gateway, until the lease ends."""
        ...

    async def uses(self) -> Uses:
        """Return the uses of all gateways whose lease is valid."""
        ...

    def watch_uses(self, *, poll_ms: int = 1_000) -> AsyncIterator[Uses]:
        """Yield the uses now, after every `use`, and at least every `poll_ms`. Continue through outages."""
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


SOCKET_TIMEOUT_MS: Final = 500
CALL_TIMEOUT_S: Final = 1.5

T = TypeVar("T")
_OUTLOOKS: Final = msgspec.json.Decoder(dict[str, ModelOutlook])
_USES: Final = msgspec.json.Decoder(dict[str, ModelUse])
_ENTRY: Final = msgspec.json.Decoder(ModelEntry)
_TIMES: Final = msgspec.json.Decoder(LoadTimes)
_PUBLISH_OUTLOOKS: Final = """
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
    """A ModelCatalogue over Redis 6.2 or later.

    It consists of hashes of entries and load times, the planner's outlooks under a lease, a lease key for each
    gateway's use, and two channels that announce changes.
    """

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._publish_outlooks = self._redis.register_script(_PUBLISH_OUTLOOKS)
        self._use = self._redis.register_script(_USE)
        self._prune = self._redis.register_script(_PRUNE)

    async def put(self, *entries: ModelEntry) -> None:
        values = {entry.name: msgspec.json.encode(entry) for entry in entries}

        def act(pipe: Any) -> None:
            pipe.hset(keys.models(self._cluster), mapping=values)
            pipe.incr(keys.model_edits(self._cluster))

        await self._change(act)

    async def remove(self, name: str) -> bool:
        def act(pipe: Any) -> None:
            pipe.hdel(keys.models(self._cluster), name)
            pipe.hdel(keys.model_times(self._cluster), name)
            pipe.incr(keys.model_edits(self._cluster))

        return bool((await self._change(act))[0])

    async def measured(self, name: str, times: LoadTimes) -> None:
        await self._change(lambda pipe: pipe.hset(keys.model_times(self._cluster), name, msgspec.json.encode(times)))

    async def read(self) -> Catalogued:
        # All in one round trip. Edits are read after entries: if entries are seen as removed, so is the edit.
        reads = self._redis.pipeline(transaction=False)
        reads.hgetall(keys.models(self._cluster))
        reads.hgetall(keys.model_times(self._cluster))
        reads.get(keys.model_outlook(self._cluster))
        reads.get(keys.model_edits(self._cluster))
        entries, times, outlooks, edits = await _bounded(reads.execute())
        return Catalogued(
            {name: entry for name, entry in _decoded(_ENTRY, entries).items() if entry.name == name},
            _decoded(_TIMES, times),
            _outlooks(outlooks),
            int(edits or 0),
        )

    async def watch(self, *, poll_ms: int = 2_000) -> AsyncGenerator[Catalogued, None]:
        async with aclosing(self._watch(keys.model_changes(self._cluster), self.read, poll_ms)) as found:
            async for each in found:
                yield each

    async def publish_outlooks(self, outlooks: Mapping[str, ModelOutlook], *, lease_ms: int) -> None:
        value = msgspec.json.encode(dict(sorted(outlooks.items())))
        names = [keys.model_outlook(self._cluster), keys.model_changes(self._cluster)]
        await _bounded(self._publish_outlooks(keys=names, args=[value, lease_ms]))

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
    try:
        return decoder.decode(value) if value is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
