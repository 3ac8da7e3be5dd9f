"""Contract tests of KvIndex over the embedded Redis, a real Redis and the store in memory that simulations use."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.contracts.hashing import HASH_BYTES
from libs.stores.kvindex import KvIndex, PrefixQuery
from libs.testing.contract.databases import Database
from libs.testing.examples import examples

MODEL = "a/model:with punctuation"
LONG_MS = 60_000
BLOCKS = [bytes([number]) * HASH_BYTES for number in range(8)]


@pytest.fixture
async def index(database: Database, cluster: str) -> AsyncIterator[KvIndex]:
    index = database.kv_index(cluster, lookup_timeout_s=1.0)
    yield index
    await index.close()


async def held(index: KvIndex, prompt: Sequence[bytes], *workers: str) -> dict[str, int]:
    ((found,),) = await index.longest_prefix([PrefixQuery(MODEL, [prompt], workers)])
    return dict(found)


async def eventually(index: KvIndex, prompt: Sequence[bytes], expected: dict[str, int], *workers: str) -> None:
    async with asyncio.timeout(10):
        while await held(index, prompt, *workers) != expected:
            await asyncio.sleep(0.02)


async def test_a_worker_holds_the_blocks_it_stored_and_has_not_removed(index: KvIndex) -> None:
    await index.publish(MODEL, "w", stored=BLOCKS[:4], removed=[])
    await index.publish(MODEL, "w", stored=[BLOCKS[4]], removed=[BLOCKS[2]])
    assert await held(index, BLOCKS, "w", "other") == {"w": 2}
    await index.publish(MODEL, "w", stored=[BLOCKS[2]], removed=[])
    assert await held(index, BLOCKS, "w") == {"w": 5}


async def test_a_block_stored_and_removed_in_one_call_is_not_held(index: KvIndex) -> None:
    await index.publish(MODEL, "w", stored=BLOCKS[:2], removed=[BLOCKS[1]])
    assert await held(index, BLOCKS, "w") == {"w": 1}


async def test_models_and_clusters_have_separate_indexes(database: Database, index: KvIndex) -> None:
    await index.publish("another", "w", stored=BLOCKS, removed=[])
    other = database.kv_index("another-cluster", lookup_timeout_s=1.0)
    await other.publish(MODEL, "w", stored=BLOCKS, removed=[])
    await other.forget(MODEL, "w")
    await other.close()
    await other.close()
    assert await held(index, BLOCKS, "w") == {}


async def test_forgetting_a_worker_drops_all_its_blocks(index: KvIndex) -> None:
    await index.publish(MODEL, "a", stored=BLOCKS, removed=[])
    await index.publish(MODEL, "b", stored=BLOCKS, removed=[])
    await index.forget(MODEL, "a")
    assert await held(index, BLOCKS, "a", "b") == {"b": len(BLOCKS)}


async def test_all_blocks_of_a_worker_expire_with_its_lease(index: KvIndex) -> None:
    await index.publish(MODEL, "w", stored=BLOCKS, removed=[])
    await index.renew(MODEL, "w", lease_ms=150)
    await eventually(index, BLOCKS, {}, "w")


async def test_a_restarted_worker_loses_the_blocks_of_its_earlier_incarnation(database: Database, cluster: str) -> None:
    before = database.kv_index(cluster, lookup_timeout_s=1.0)
    await before.publish(MODEL, "w", stored=BLOCKS, removed=[])
    await before.close()
    after = database.kv_index(cluster, lookup_timeout_s=1.0)
    await after.publish(MODEL, "w", stored=BLOCKS[:1], removed=[])
    assert await held(after, BLOCKS, "w") == {"w": 1}
    await after.close()


async def test_many_blocks_prompts_and_workers_are_looked_up_in_one_call(index: KvIndex) -> None:
    blocks = [number.to_bytes(HASH_BYTES, "big") for number in range(10_000)]
    workers = [f"w{number}" for number in range(4)]
    for number, worker in enumerate(workers):
        await index.publish(MODEL, worker, stored=blocks[: 2_500 * (number + 1)], removed=[])
    (found,) = await index.longest_prefix([PrefixQuery(MODEL, [blocks, blocks[:3], [], blocks[5:7]], workers)])
    assert found[0] == {"w0": 2_500, "w1": 5_000, "w2": 7_500, "w3": 10_000}
    assert found[1:] == [dict.fromkeys(workers, 3), {}, dict.fromkeys(workers, 2)]


@pytest.mark.alone
async def test_a_frozen_store_costs_reuse_briefly_and_raises_no_error(database: Database, cluster: str) -> None:
    index = database.kv_index(cluster)
    await index.publish(MODEL, "w", stored=BLOCKS[:2], removed=[])
    loop = asyncio.get_running_loop()
    database.server.freeze()
    try:
        started_s = loop.time()
        assert await index.longest_prefix([PrefixQuery(MODEL, [BLOCKS, BLOCKS], ["w"])]) == [[{}, {}]]
        for _ in range(100):
            assert await held(index, BLOCKS, "w") == {}
        assert loop.time() - started_s < 0.5
        await index.publish(MODEL, "w", stored=BLOCKS[2:3], removed=BLOCKS[1:2])
        assert loop.time() - started_s < 3
    finally:
        database.server.thaw()
    assert index.stats().lookup_errors == 101
    assert index.stats().change_errors == 1
    await index.renew(MODEL, "w", lease_ms=LONG_MS)
    await eventually(index, BLOCKS, {"w": 1}, "w")
    await index.close()


async def test_a_store_that_restarted_empty_is_filled_again(database: Database, index: KvIndex) -> None:
    await index.publish(MODEL, "w", stored=BLOCKS, removed=[])
    database.server.kill()
    try:
        assert await held(index, BLOCKS, "w") == {}
        await index.publish(MODEL, "w", stored=[], removed=BLOCKS[4:])
        await index.renew(MODEL, "w", lease_ms=LONG_MS)
        await index.forget(MODEL, "gone")
    finally:
        database.server.start()
    await index.renew(MODEL, "w", lease_ms=LONG_MS)
    await eventually(index, BLOCKS, {"w": 4}, "w")


async def test_a_store_that_was_emptied_unnoticed_is_filled_at_the_next_renewal(
    database: Database, index: KvIndex
) -> None:
    await index.publish(MODEL, "w", stored=BLOCKS, removed=[])
    database.server.kill()
    database.server.start()
    await index.renew(MODEL, "w", lease_ms=LONG_MS)
    await eventually(index, BLOCKS, {"w": len(BLOCKS)}, "w")


_some_blocks = st.lists(st.sampled_from(BLOCKS), max_size=6)
_changes = st.lists(st.tuples(st.sampled_from(["a", "b"]), _some_blocks, _some_blocks), max_size=6)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=_changes, prompts=st.lists(_some_blocks, max_size=4))
def test_lookups_agree_with_a_dictionary_of_sets(
    database: Database,
    cluster: str,
    changes: list[tuple[str, list[bytes], list[bytes]]],
    prompts: list[list[bytes]],
) -> None:
    model: dict[str, set[bytes]] = {"a": set(), "b": set()}

    def leading(worker: str, prompt: list[bytes]) -> int:
        return next((n for n, block in enumerate(prompt) if block not in model[worker]), len(prompt))

    async def check() -> None:
        index = database.kv_index(cluster, lookup_timeout_s=1.0)
        for worker in model:
            await index.forget(MODEL, worker)
        for worker, stored, removed in changes:
            await index.publish(MODEL, worker, stored=stored, removed=removed)
            model[worker] = (model[worker] | set(stored)) - set(removed)
        (found,) = await index.longest_prefix([PrefixQuery(MODEL, prompts, list(model))])
        assert found == [{w: n for w in model if (n := leading(w, prompt))} for prompt in prompts]
        await index.close()

    asyncio.run(check())
