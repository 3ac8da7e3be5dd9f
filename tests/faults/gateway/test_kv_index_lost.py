"""Tests of cached prefixes found through Redis, and of the loss of Redis."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from libs.contracts.keys import kv_blocks
from libs.runtime.tasks import TaskOwner
from libs.stores.kvindex import RedisKvIndex
from libs.testing.servers.stores import RedisServer
from libs.testing.wait import until
from libs.testing.workers.hosts import LocalWorker, local_worker
from libs.testing.workers.scripted import scripted_worker
from services.gateway.request.prompt import MAX_PROBES, PrefixHints

LEASE_MS = 1200
SPEEDUP = 4.0
"""A speed so low that a cached prompt saves more than a busy machine adds to any queue."""
PROMPT = [1 + place % 200 for place in range(4000)]
CACHED_TOKENS = 3984
"""The number of all blocks but the last token's."""


@asynccontextmanager
async def _cluster(redis: RedisServer, cluster: str, open_gateway_over: Any) -> AsyncIterator[Any]:
    """Three prefill workers and a decode worker on the sim engine, and a gateway, each with its own view of Redis."""
    async with AsyncExitStack() as stack:

        def index() -> RedisKvIndex:
            return RedisKvIndex(redis.url, cluster, lookup_timeout_s=1.0)

        workers: list[LocalWorker] = [
            await stack.enter_async_context(
                local_worker(
                    name,
                    name[:-1],
                    kv_index=index(),
                    kv_index_lease_ms=LEASE_MS,
                    cluster=cluster,
                    sim_speedup=SPEEDUP,
                )
            )
            for name in ("prefill0", "prefill1", "prefill2", "decode0")
        ]
        gateway_index = index()
        stack.push_async_callback(gateway_index.close)
        listed = [worker.host.worker() for worker in workers]
        yield await stack.enter_async_context(
            open_gateway_over(*listed, kv_index=gateway_index, cluster=cluster, prefix_wait_ms=1000)
        )


async def _ask(gateway: Any, prompt: list[int]) -> int:
    """Return how many of its tokens were cached."""
    answer = await gateway.complete(2, prompt=prompt, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 2
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def _listed(redis: RedisServer, cluster: str) -> set[tuple[bytes, bytes]]:
    """(worker's key, block) of the prefill workers in Redis."""
    async with Redis.from_url(redis.url) as client:
        keys = [key async for key in client.scan_iter(kv_blocks(cluster, "sim", "prefill*"))]
        return {(key, block) for key in keys for block in await client.smembers(key)}


async def _until_listed(redis: RedisServer, cluster: str, blocks: int) -> set[tuple[bytes, bytes]]:
    async with asyncio.timeout(10):
        while len(listed := await _listed(redis, cluster)) < blocks:
            await asyncio.sleep(0.02)
    return listed


async def test_a_repeated_long_prompt_is_served_by_the_worker_that_has_its_prefix(
    redis: RedisServer, cluster: str, open_gateway_over: Any
) -> None:
    async with _cluster(redis, cluster, open_gateway_over) as gateway:
        prompts = [[place, *PROMPT[1:]] for place in range(4)]
        assert [await _ask(gateway, prompt) for prompt in prompts] == [0] * 4
        await _until_listed(redis, cluster, 4 * CACHED_TOKENS // 16)
        for prompt in (*prompts, *reversed(prompts)):
            assert await _ask(gateway, prompt) == CACHED_TOKENS
        served = [event.prefill_worker for event in gateway.events()]
        assert len(set(served[:4])) > 1  # an idle cluster spreads unknown prompts
        assert served[4:8] == served[:4]
        assert served[8:] == served[3::-1]
        assert all(event.predicted_ttft_ns and not event.recomputes for event in gateway.events())
        text = (await gateway.http.get("/metrics")).text
        assert 'fulcrum_gateway_time_to_first_token_predicted_ratio_count{model="sim"} 12.0' in text
        assert 'fulcrum_gateway_recomputes_total{model="sim"} 0.0' in text
        assert "fulcrum_kv_index_lookups_total 12.0" in text


async def test_an_index_that_is_emptied_under_load_is_rebuilt_by_the_workers(
    redis: RedisServer, cluster: str, open_gateway_over: Any
) -> None:
    async with _cluster(redis, cluster, open_gateway_over) as gateway:
        await _ask(gateway, PROMPT)
        before = await _until_listed(redis, cluster, CACHED_TOKENS // 16)
        requests = [asyncio.create_task(_ask(gateway, [number, *PROMPT[:600]])) for number in range(200, 240)]
        await until(lambda: sum(task.done() for task in requests) > 5)
        async with Redis.from_url(redis.url) as client:
            await client.flushall()
        assert await asyncio.gather(*requests) == [0] * len(requests)
        assert before <= await _until_listed(redis, cluster, CACHED_TOKENS // 16 + 40 * (600 // 16))


async def test_a_redis_that_dies_under_traffic_costs_reuse_and_nothing_else(
    redis: RedisServer, cluster: str, open_gateway_over: Any
) -> None:
    async with _cluster(redis, cluster, open_gateway_over) as gateway:
        await _ask(gateway, PROMPT)
        requests = [asyncio.create_task(_ask(gateway, [number, *PROMPT[:600]])) for number in range(200, 220)]
        await until(lambda: any(task.done() for task in requests))
        redis.server.kill()
        try:
            await asyncio.gather(*requests)
            await asyncio.gather(*(_ask(gateway, PROMPT) for _ in range(5)))
        finally:
            redis.server.start()
        await _until_listed(redis, cluster, CACHED_TOKENS // 16)
        await until(gateway.idle)
        assert await _ask(gateway, PROMPT) == CACHED_TOKENS


# ------------------------------------------------------------ round trips


@asynccontextmanager
async def _hints(
    redis: RedisServer, cluster: str, open_gateway_over: Any, names: tuple[str, ...]
) -> AsyncIterator[Any]:
    """Yield the lookups of a gateway that is connected to scripted workers."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(name, "prefill")) for name in names]
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in workers)))
        index, tasks = RedisKvIndex(redis.url, cluster, lookup_timeout_s=1.0), TaskOwner()
        threads = stack.enter_context(ThreadPoolExecutor(1))
        stack.push_async_callback(index.close)
        stack.push_async_callback(tasks.close)
        yield PrefixHints(index, gateway.running.fleet, tasks, threads, max_hold_ms=5.0), index


async def test_one_round_trip_finds_the_prefixes_of_all_requests_of_a_loop_turn(
    redis: RedisServer, cluster: str, open_gateway_over: Any
) -> None:
    async with (
        _hints(redis, cluster, open_gateway_over, ("p0", "p1", "p2")) as (hints, index),
        Redis.from_url(redis.url) as client,
    ):

        async def commands() -> int:
            return int((await client.info("commandstats")).get("cmdstat_smismember", {}).get("calls", 0))

        before = await commands()
        await asyncio.gather(*(hints.cached_tokens("sim", [number, *PROMPT], "default") for number in range(60)))
        async with asyncio.timeout(10):  # the requests do not wait for a late answer
            while await commands() < before + 3:
                await asyncio.sleep(0.01)
        assert await commands() == before + 3  # one for each worker
        assert index.stats().lookups == 1


async def test_a_prompt_of_100k_tokens_looks_up_a_bounded_number_of_blocks(
    redis: RedisServer, cluster: str, open_gateway_over: Any
) -> None:
    calls: list[int] = []

    class Counting(RedisKvIndex):
        async def longest_prefix(self, queries: Any) -> Any:
            calls.extend(len(prompt) for query in queries for prompt in query.prompts)
            return [[{"p1": 48} for _ in query.prompts] for query in queries]

    async with _hints(redis, cluster, open_gateway_over, ("p0", "p1")) as (hints, _):
        hints._index = Counting(redis.url, cluster)
        found = await hints.cached_tokens("sim", PROMPT * 25, "default")
        await until(lambda: found)  # hashed on another thread, and perhaps late
        assert calls == [MAX_PROBES]
        assert found == {"p1": 6250 * 48 // 64 * 16}
        await hints._index.close()


async def test_a_late_lookup_delays_no_request_and_is_used_when_it_arrives(
    redis: RedisServer, cluster: str, open_gateway_over: Any
) -> None:
    answered = asyncio.Event()

    class Slow(RedisKvIndex):
        async def longest_prefix(self, queries: Any) -> Any:
            await answered.wait()
            return [[{"p0": 2} for _ in query.prompts] for query in queries]

    async with _hints(redis, cluster, open_gateway_over, ("p0", "p1")) as (hints, _):
        hints._index = Slow(redis.url, cluster)
        found = await asyncio.wait_for(hints.cached_tokens("sim", PROMPT[:200], "default"), 2)
        assert (found, hints.late) == ({}, 1)
        answered.set()
        await until(lambda: found == {"p0": 32})
        await hints._index.close()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_does_not_cancel_the_lookup_of_others(
    redis: RedisServer, cluster: str, open_gateway_over: Any, leaves: bool
) -> None:
    async with _hints(redis, cluster, open_gateway_over, ("p0", "p1")) as (hints, index):
        one = asyncio.create_task(hints.cached_tokens("sim", PROMPT[:200], "default"))
        other = asyncio.create_task(hints.cached_tokens("sim", PROMPT[:300], "default"))
        await asyncio.sleep(0)
        if leaves:
            one.cancel()
        assert await other == {}
        await until(lambda: index.stats().lookups == 1)
        await asyncio.gather(one, return_exceptions=True)
