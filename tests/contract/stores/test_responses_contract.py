"""Contract tests of the response store in memory, over the embedded Redis and over a real Redis."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from libs.contracts import keys
from libs.stores import responses
from libs.stores.responses import (
    MAX_RESPONSE_BYTES,
    MemoryResponses,
    RedisResponses,
    ResponsesDown,
    ResponseStore,
)
from libs.testing.servers.stores import RedisServer

KEEP_S = 60


@pytest.fixture(params=["memory", "embedded", "real"])
async def store(request: pytest.FixtureRequest, cluster: str) -> AsyncIterator[ResponseStore]:
    found: ResponseStore
    if request.param == "memory":
        found = MemoryResponses(time.time)
    else:
        found = RedisResponses(request.getfixturevalue(f"{request.param}_redis_server").url, cluster)
    yield found
    await found.close()
    await found.close()


async def test_a_value_is_visible_to_its_tenant_alone(store: ResponseStore) -> None:
    assert await store.keep("a", "one", b"\x00value", KEEP_S)
    assert await store.get("a", "one") == b"\x00value"
    assert await store.get("b", "one") is None and await store.get("a", "other") is None
    assert not await store.delete("b", "one") and await store.get("a", "one") is not None
    assert await store.delete("a", "one") and not await store.delete("a", "one")
    assert await store.get("a", "one") is None


async def test_a_value_expires(store: ResponseStore) -> None:
    await store.keep("a", "short", b"x", 1)
    await store.keep("a", "long", b"y", KEEP_S)

    async def is_over() -> bool:
        return await store.get("a", "short") is None

    async with asyncio.timeout(20):
        while not await is_over():
            await asyncio.sleep(0.05)
    assert not await store.delete("a", "short")
    assert await store.get("a", "long") == b"y"


async def test_the_oldest_values_are_evicted(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_RESPONSES", 2)
    monkeypatch.setattr(responses, "MAX_TENANT_BYTES", 10)
    for name in ("one", "two", "three"):
        await store.keep("a", name, b"x", KEEP_S)
    found = [await store.get("a", name) for name in ("two", "three")]
    assert await store.get("a", "one") is None and found == [b"x", b"x"]
    await store.keep("a", "large", b"y" * 10, KEEP_S)
    assert [await store.get("a", name) for name in ("two", "three", "large")] == [None, None, b"y" * 10]
    await store.keep("a", "large", b"z" * 9, KEEP_S)
    await store.keep("a", "small", b"w", KEEP_S)
    assert [await store.get("a", name) for name in ("large", "small")] == [b"z" * 9, b"w"]


async def test_a_value_over_the_size_bound_is_not_stored(store: ResponseStore) -> None:
    assert not await store.keep("a", "one", bytes(MAX_RESPONSE_BYTES + 1), KEEP_S)
    assert await store.get("a", "one") is None


async def test_a_store_that_is_away_raises_an_error(cluster: str) -> None:
    away = RedisResponses("redis://127.0.0.1:1/0", cluster)
    for call in (away.keep("a", "one", b"x", 1), away.get("a", "one"), away.delete("a", "one")):
        with pytest.raises(ResponsesDown):
            await call
    await away.close()


FOREIGN: list[tuple[str, ...]] = [
    ("SET", "nonsense"), ("SET", "-1.5"), ("RPUSH", "a"), ("SADD", "a"), ("HSET", "a", "b"), ("ZADD", "1", "a"),
    ("XADD", "*", "a", "b"),
]  # fmt: skip


@pytest.mark.parametrize("part", ["values", "ends", "bytes"])
@pytest.mark.parametrize("foreign", FOREIGN, ids=" ".join)
async def test_a_foreign_value_under_a_key_does_not_prevent_storing(
    embedded_redis_server: RedisServer, cluster: str, part: str, foreign: tuple[str, ...]
) -> None:
    store, raw = RedisResponses(embedded_redis_server.url, cluster), Redis.from_url(embedded_redis_server.url)
    key = keys.responses(cluster, "a", part)
    for name in ("one", "two"):
        assert await store.keep("a", name, b"earlier", KEEP_S)
        await raw.unlink(key)
        await raw.execute_command(foreign[0], key, *foreign[1:])
    assert await store.keep("a", "three", b"value", KEEP_S)
    assert await store.get("a", "three") == b"value"
    assert await store.get("b", "three") is None
    kept = [each for each in ("one", "two", "three") if await store.get("a", each) is not None]
    counted = int(await raw.get(keys.responses(cluster, "a", "bytes")))
    assert counted >= sum(len("earlier" if each != "three" else "value") for each in kept)
    assert await store.delete("a", "three")
    assert await store.get("a", "three") is None
    await store.close()
    await raw.aclose()


@pytest.mark.parametrize("name", ["maxmemory", "min-replicas-to-write"])
async def test_a_store_that_refuses_writes_reports_it_and_still_reads(
    embedded_redis_server: RedisServer, cluster: str, name: str
) -> None:
    store, raw = RedisResponses(embedded_redis_server.url, cluster), Redis.from_url(embedded_redis_server.url)
    assert await store.keep("a", "one", b"value", KEEP_S)
    await raw.config_set(name, "1")
    try:
        with pytest.raises(ResponsesDown):
            await store.keep("a", "two", b"value", KEEP_S)
        assert await store.get("a", "one") == b"value"
    finally:
        await raw.config_set(name, "0")
    assert await store.get("a", "two") is None
    await store.close()
    await raw.aclose()
