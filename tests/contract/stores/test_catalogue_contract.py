"""Contract tests of ModelCatalogue over the embedded Redis, a real Redis and the store in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from libs.stores.catalogue import (
    CatalogueDown,
    LoadTimes,
    ModelCatalogue,
    ModelEntry,
    ModelOutlook,
    ModelUse,
    Reservation,
)
from libs.testing.contract.databases import Database

LONG_MS = 60_000
A = ModelEntry("org/a:model with words", "builtin:sim", 16_000_000_000, floor=1, pinned=True, priority=-3)
B = ModelEntry("b", "/models/b", 1, ttft_ms=500.0, tpot_ms=20.0, reservations=(Reservation(2, 540, 1_080),))


@pytest.fixture
async def catalogue(database: Database, cluster: str) -> AsyncIterator[ModelCatalogue]:
    catalogue = database.catalogue(cluster)
    yield catalogue
    await catalogue.close()


async def eventually(found: Callable[[], Awaitable[Any]], expected: Any) -> None:
    async with asyncio.timeout(10):
        while await found() != expected:
            await asyncio.sleep(0.02)


async def test_entries_are_read_as_they_were_last_put(catalogue: ModelCatalogue) -> None:
    assert (await catalogue.read()).entries == {}
    await catalogue.put(A, ModelEntry("b", "/elsewhere", 2))
    await catalogue.put(B)
    assert (await catalogue.read()).entries == {"b": B, A.name: A}


async def test_removing_a_model_removes_its_load_times(catalogue: ModelCatalogue) -> None:
    await catalogue.put(A)
    await catalogue.measured(A.name, LoadTimes(load_s=4.5))
    assert (await catalogue.read()).times == {A.name: LoadTimes(load_s=4.5)}
    assert await catalogue.remove(A.name)
    assert not await catalogue.remove(A.name)
    found = await catalogue.read()
    assert (found.entries, found.times) == ({}, {})


async def test_a_removed_last_model_is_told_from_a_store_that_holds_nothing(catalogue: ModelCatalogue) -> None:
    assert (await catalogue.read()).is_lost
    await catalogue.put(A)
    await catalogue.remove(A.name)
    found = await catalogue.read()
    assert (found.entries, found.edits, found.is_lost) == ({}, 2, False)


async def test_clusters_have_separate_catalogues(database: Database, catalogue: ModelCatalogue) -> None:
    await catalogue.put(A)
    other = database.catalogue("another-cluster")
    await other.remove(A.name)
    assert (await other.read()).entries == {}
    assert await other.uses() == {}
    await other.close()
    await other.close()
    assert (await catalogue.read()).entries == {A.name: A}


async def test_an_outlook_holds_until_its_lease_ends(catalogue: ModelCatalogue) -> None:
    outlooks = {"a": ModelOutlook("loading", wait_s=3.5, ready_unix_ms=17), "b": ModelOutlook("disk")}

    async def reported() -> Any:
        return (await catalogue.read()).outlooks

    await catalogue.publish_outlooks(outlooks, lease_ms=LONG_MS)
    assert await reported() == outlooks
    await catalogue.publish_outlooks({"a": ModelOutlook("serving")}, lease_ms=150)
    await eventually(reported, {})


async def test_the_use_reported_by_each_gateway_lasts_until_its_lease_ends(catalogue: ModelCatalogue) -> None:
    await catalogue.use("one", {"a": ModelUse(1, 5, 1, 5, 1)}, lease_ms=LONG_MS)
    await catalogue.use("one", {"a": ModelUse(arrivals=2)}, lease_ms=LONG_MS)
    await catalogue.use("two", {"b": ModelUse(in_flight=3)}, lease_ms=150)
    await eventually(catalogue.uses, {"one": {"a": ModelUse(arrivals=2)}})


async def test_changes_of_entries_and_outlooks_are_pushed(catalogue: ModelCatalogue) -> None:
    async with aclosing(catalogue.watch(poll_ms=LONG_MS)) as watched, asyncio.timeout(10):  # type: ignore[type-var]
        assert (await anext(watched)).entries == {}
        await catalogue.put(A)
        while A.name not in (found := await anext(watched)).entries:
            pass
        await catalogue.publish_outlooks({A.name: ModelOutlook("disk")}, lease_ms=LONG_MS)
        while not found.outlooks:
            found = await anext(watched)
        await catalogue.remove(A.name)
        while found.entries:
            found = await anext(watched)


async def test_changes_of_use_are_pushed(catalogue: ModelCatalogue) -> None:
    async with aclosing(catalogue.watch_uses(poll_ms=LONG_MS)) as watched, asyncio.timeout(10):  # type: ignore[type-var]
        assert await anext(watched) == {}
        await catalogue.use("one", {"a": ModelUse(arrivals=1)}, lease_ms=LONG_MS)
        while "one" not in await anext(watched):
            pass


async def test_a_store_outage_is_reported_and_the_watch_resumes_afterwards(
    database: Database, catalogue: ModelCatalogue
) -> None:
    async with aclosing(catalogue.watch(poll_ms=50)) as watched, asyncio.timeout(20):  # type: ignore[type-var]
        await anext(watched)
        database.server.kill()
        with pytest.raises(CatalogueDown):
            await catalogue.read()
        with pytest.raises(CatalogueDown):
            await catalogue.use("one", {}, lease_ms=LONG_MS)
        database.server.start()

        async def put() -> Any:
            try:
                await catalogue.put(B)
            except CatalogueDown:
                return False
            return True

        await eventually(put, True)
        while "b" not in (await anext(watched)).entries:
            pass
