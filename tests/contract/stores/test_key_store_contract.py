"""Contract tests of KeyStore over a file, the embedded Redis and a real Redis."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from libs.contracts.errors import KeyNotFound, StoreUnavailable
from libs.keys.book import KeySet, KeyStore, draw_key
from libs.keys.redis import RedisKeys
from libs.keys.store import FileKeys

Open = Callable[[], KeyStore]


@pytest.fixture(params=["file", "embedded", "real"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, cluster: str) -> Open:
    if request.param == "file":
        return lambda: FileKeys(tmp_path / "private" / "keys.json")
    url = request.getfixturevalue(f"{request.param}_redis_server").url
    return lambda: RedisKeys(url, cluster)


@pytest.fixture
async def store(open_store: Open) -> AsyncIterator[KeyStore]:
    found = open_store()
    yield found
    await found.close()
    await found.close()


async def test_a_store_is_empty_until_its_first_write(store: KeyStore) -> None:
    first = await store.load()
    assert first is not None and first.book == KeySet()
    assert await store.load(first.version) is None
    _, key = draw_key("a", now_s=0)
    changed = await store.change(lambda book: book.with_key(key, 0))
    then = await store.load(first.version)
    assert then is not None and then.book == changed == KeySet((key,), cache_secret=changed.cache_secret)
    assert changed.cache_secret  # drawn with the first key
    assert await store.load(then.version) is None


async def test_a_refused_change_changes_nothing(store: KeyStore) -> None:
    before = await store.load()
    assert before is not None
    with pytest.raises(KeyNotFound):
        await store.change(lambda book: book.without_key("key_none", 0))
    assert await store.load(before.version) is None


async def test_concurrent_changes_are_all_stored(open_store: Open) -> None:
    stores = [open_store() for _ in range(8)]
    keys = [draw_key(f"t{number}", now_s=0)[1] for number in range(len(stores))]
    await asyncio.gather(
        *(each.change(lambda book, key=key: book.with_key(key, 0)) for each, key in zip(stores, keys, strict=True))  # type: ignore[misc]
    )
    found = await stores[0].load()
    assert found is not None and sorted(found.book.keys, key=lambda key: key.tenant) == keys
    for each in stores:
        await each.close()


async def test_the_key_file_is_private_and_refused_if_others_can_write_it(tmp_path: Path) -> None:
    path = tmp_path / "private" / "keys.json"
    store = FileKeys(path)
    await store.change(lambda book: book.with_key(draw_key("a", now_s=0)[1], 0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir() if each.suffix not in (".json", ".lock")] == []
    path.chmod(0o666)
    with pytest.raises(StoreUnavailable, match="chmod 600"):
        await store.load()


async def test_a_redis_that_is_away_or_holds_invalid_data_raises_a_matching_error(cluster: str) -> None:
    store = RedisKeys("redis://127.0.0.1:1/0", cluster)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await store.load()
    await store.close()
