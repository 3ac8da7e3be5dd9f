"""Contract tests of the registry over the embedded Redis, a real Redis and the store in memory of simulations."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.stores.registry import Registry, RegistryDown
from libs.testing.contract.databases import Database
from libs.testing.wait import until

LEASE_MS = 60_000


def worker(**fields: Any) -> Worker:
    """Return a worker with an address, which all listed workers have."""
    return Worker(address="127.0.0.1:1", **fields)


@pytest.fixture
async def registry(database: Database, cluster: str) -> AsyncIterator[Registry]:
    registry = database.registry(cluster)
    yield registry
    await registry.close()


@asynccontextmanager
async def watching(registry: Registry, poll_ms: int = 60_000) -> AsyncIterator[list[list[str]]]:
    """Collect the ids of each list that `watch` yields."""
    lists: list[list[str]] = []

    async def read() -> None:
        async for workers in registry.watch(poll_ms=poll_ms):
            lists.append([worker.id for worker in workers])  # noqa: PERF401  (it never ends)

    task = asyncio.get_running_loop().create_task(read())
    try:
        await until(lambda: lists)
        yield lists
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def poll(condition: Callable[[], "asyncio.Future[bool]"], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_an_announced_worker_is_listed_and_found_by_id(registry: Registry) -> None:
    second = worker(id="b", incarnation=2**63 + 1, pid=7)
    second.capabilities.kv_layout = "float32/\x00é"
    await registry.announce(second, lease_ms=LEASE_MS)
    await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
    assert await registry.workers() == [worker(id="a", incarnation=1), second]


async def test_a_role_outlives_its_lease_until_it_expires_or_is_forgotten(registry: Registry) -> None:
    assert await registry.kept_role("a") is None
    moved = worker(id="a", incarnation=1, pid=7)
    moved.assignment.role, moved.role_change.actor = 1, "jo"
    await registry.keep_role(moved, keep_ms=LEASE_MS)
    kept = await registry.kept_role("a")
    assert kept == Worker(id="a", assignment=moved.assignment, role_change=moved.role_change)
    assert await registry.workers() == []
    await registry.keep_role(moved, keep_ms=0)
    assert await registry.kept_role("a") is None
    await registry.keep_role(moved, keep_ms=50)

    async def over() -> bool:
        return await registry.kept_role("a") is None

    await poll(over)


async def test_a_worker_is_gone_when_its_lease_ends(registry: Registry) -> None:
    await registry.announce(worker(id="short", incarnation=1), lease_ms=100)
    await registry.announce(worker(id="long", incarnation=1), lease_ms=LEASE_MS)

    async def only_long() -> bool:
        return [worker.id for worker in await registry.workers()] == ["long"]

    await poll(only_long)


async def test_renewing_keeps_a_worker_past_its_first_lease(registry: Registry) -> None:
    loop = asyncio.get_running_loop()
    await registry.announce(worker(id="a", incarnation=1), lease_ms=200)
    await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
    first_lease_ended_s = loop.time() + 0.3
    while loop.time() < first_lease_ended_s:
        assert len(await registry.workers()) == 1
        await asyncio.sleep(0.02)


async def test_an_older_incarnation_neither_withdraws_nor_replaces_a_newer_one(registry: Registry) -> None:
    newer = worker(id="a", incarnation=2**64 - 1, pid=2)
    await registry.announce(newer, lease_ms=LEASE_MS)
    await registry.withdraw("a", 2**64 - 2)
    await registry.announce(worker(id="a", incarnation=9, pid=1), lease_ms=LEASE_MS)
    assert await registry.workers() == [newer]


async def test_withdrawing_removes_the_worker_and_a_second_time_does_nothing(registry: Registry) -> None:
    await registry.announce(worker(id="a", incarnation=5), lease_ms=LEASE_MS)
    await registry.withdraw("a", 5)
    await registry.withdraw("a", 5)
    assert await registry.workers() == []


async def test_a_newer_incarnation_replaces_an_older_one(registry: Registry) -> None:
    await registry.announce(worker(id="a", incarnation=5), lease_ms=LEASE_MS)
    await registry.announce(worker(id="a", incarnation=6), lease_ms=LEASE_MS)
    assert [worker.incarnation for worker in await registry.workers()] == [6]


async def test_a_watch_yields_at_once_and_on_each_change_long_before_it_polls(registry: Registry) -> None:
    async with watching(registry) as lists:
        assert lists == [[]]
        await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
        await until(lambda: lists[-1] == ["a"])
        await registry.withdraw("a", 1)
        await until(lambda: lists[-1] == [])


async def test_a_renewal_that_changes_nothing_is_not_pushed(registry: Registry) -> None:
    same = worker(id="a", incarnation=1)
    await registry.announce(same, lease_ms=LEASE_MS)
    async with watching(registry) as lists:
        for _ in range(10):
            await registry.announce(same, lease_ms=LEASE_MS)
        await registry.announce(worker(id="b", incarnation=1), lease_ms=LEASE_MS)
        await until(lambda: lists[-1] == ["a", "b"])
    assert lists == [["a"], ["a", "b"]]


async def test_a_watch_notices_an_ended_lease_by_polling(registry: Registry) -> None:
    await registry.announce(worker(id="a", incarnation=1), lease_ms=300)
    async with watching(registry, poll_ms=50) as lists:
        assert lists[0] == ["a"]
        await until(lambda: lists[-1] == [])


async def test_clusters_that_share_a_server_do_not_see_each_other(database: Database, registry: Registry) -> None:
    other = database.registry("another-cluster")
    await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
    assert await other.workers() == []
    await other.close()
    await other.close()


async def test_a_frozen_server_is_reported_in_bounded_time_and_survived(database: Database, registry: Registry) -> None:
    await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
    async with watching(registry, poll_ms=50) as lists:
        database.server.freeze()
        try:
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(RegistryDown):
                await registry.workers()
            with pytest.raises(RegistryDown):
                await registry.announce(worker(id="b", incarnation=1), lease_ms=LEASE_MS)
            assert asyncio.get_running_loop().time() - started_s < 4
        finally:
            database.server.thaw()
        await registry.announce(worker(id="c", incarnation=1), lease_ms=LEASE_MS)
        await until(lambda: "c" in lists[-1])


async def test_a_killed_server_is_reported_and_the_watch_continues_after_its_restart(
    database: Database, registry: Registry
) -> None:
    await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
    async with watching(registry) as lists:
        database.server.kill()
        try:
            with pytest.raises(RegistryDown):
                await registry.workers()
        finally:
            database.server.start()
        await until(lambda: lists[-1] == [], what="a list from the new, empty server")
        await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
        await until(lambda: lists[-1] == ["a"])


async def test_a_cancelled_call_leaves_the_registry_usable(database: Database, registry: Registry) -> None:
    database.server.freeze()
    try:
        calls = [asyncio.ensure_future(registry.workers()) for _ in range(5)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    finally:
        database.server.thaw()
    await registry.announce(worker(id="a", incarnation=1), lease_ms=LEASE_MS)
    assert [worker.id for worker in await registry.workers()] == ["a"]
