"""Tests of peers that vanish without closing their connection: detected within named bounds and routed around."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.runtime.net.ports import held_port
from libs.runtime.net.rpc import KEEPALIVE_MS
from libs.testing.servers.proxy import VanishingProxy, vanishing_proxy
from libs.testing.wait import until
from libs.testing.workers.hosts import LocalWorker, local_worker
from libs.testing.workers.scripted import Plan, expected_text, scripted_worker

pytestmark = pytest.mark.alone

TOKENS = 60
SLOW = {"sim_speedup": 1.0}
FOUND_S = 2 * KEEPALIVE_MS / 1000
"""A ping after one keepalive interval, and no answer within another."""
BUSY_S = 10.0


def holds_nothing(*workers: LocalWorker) -> bool:
    found = [worker.host.integrity() for worker in workers]
    return all(each.live_sequences + each.leased_handles + each.referenced_blocks == 0 for each in found)


def behind(proxy: VanishingProxy, worker: Worker) -> Worker:
    """The worker at the proxy's address."""
    moved = Worker()
    moved.CopyFrom(worker)
    moved.address = proxy.address
    return moved


async def test_a_worker_that_vanishes_is_routed_around_and_forgets_the_gateway(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        mixed = [await stack.enter_async_context(local_worker(n, "mixed", budget_tokens=64, **SLOW)) for n in "ab"]
        proxy = await stack.enter_async_context(vanishing_proxy(mixed[0].address))
        listed = [behind(proxy, mixed[0].host.worker()), mixed[1].host.worker()]
        gateway = await stack.enter_async_context(open_gateway_over(*listed))
        requested = [{"seed": number, "temperature": 0.8, "ignore_eos": True} for number in range(6)]
        expected = await asyncio.gather(*(gateway.complete(TOKENS, **fields) for fields in requested))
        asking = asyncio.gather(*(gateway.complete(TOKENS, **fields) for fields in requested))
        await until(lambda: mixed[0].host.integrity().live_sequences > 1, what="sequences there")
        proxy.forwards.clear()
        answers = await asking
        assert [each.json()["choices"] for each in answers] == [each.json()["choices"] for each in expected]
        assert "fulcrum_gateway_silences_total 1.0" in (await gateway.http.get("/metrics")).text
        await until(gateway.idle, what="an idle gateway")
        # The end of its stream does not reach the worker either.
        await until(lambda: holds_nothing(*mixed), timeout_s=FOUND_S + BUSY_S, what="workers that hold nothing")
        proxy.forwards.set()
        await until(lambda: gateway.connected == {"a", "b"}, what="its return")
        assert (await gateway.complete(5)).status_code == 200


async def test_a_single_worker_that_vanishes_is_detected_and_open_streams_end_with_an_error(
    open_gateway_over: Any,
) -> None:
    """No other worker could take over, so only keepalive detects it."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(scripted_worker("m0", "mixed", plans=(Plan(tokens=3, hang=True),)))
        proxy = await stack.enter_async_context(vanishing_proxy(worker.worker.address))
        listed = behind(proxy, worker.worker)
        worker.worker.address = proxy.address
        gateway = await stack.enter_async_context(open_gateway_over(listed, no_workers_wait_ms=500))
        body = {"model": "sim", "prompt": "hello", "max_tokens": 9, "stream": True}
        async with gateway.http.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            proxy.forwards.clear()
            async with asyncio.timeout(FOUND_S + 0.5 + BUSY_S):
                rest = [line async for line in lines if line]
        assert '"text":"a' in first
        assert '"no_workers"' in rest[-1]
        assert not gateway.connected
        await until(gateway.idle, what="an idle gateway")
        proxy.forwards.set()
        await until(lambda: gateway.connected == {"m0"}, what="its return")
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)


async def test_a_source_of_blocks_that_vanishes_costs_one_attempt(open_gateway_over: Any) -> None:
    """Only the decode worker misses it; for the gateway it is present."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(vanishing_proxy())
        port = stack.enter_context(held_port())
        proxy.target = f"127.0.0.1:{port}"
        hidden = {"port": port, "advertise": proxy.address}
        prefill = await stack.enter_async_context(local_worker("p0", "prefill", **hidden))
        spare = await stack.enter_async_context(local_worker("p1", "prefill"))
        decode = await stack.enter_async_context(local_worker("d0", "decode"))
        listed = prefill.host.worker()
        listed.address = proxy.target
        gateway = await stack.enter_async_context(open_gateway_over(listed, decode.host.worker()))
        proxy.forwards.clear()
        body = {"prompt": "x" * 1024, "seed": 1, "ignore_eos": True}
        asking = asyncio.ensure_future(gateway.complete(TOKENS, **body))
        await until(lambda: decode.host.engine.load().awaiting_kv, what="the pull")
        await gateway.registry.announce(spare.host.worker(), lease_ms=1000)
        answer = await asking
        assert (gateway.events()[-1].reroutes, gateway.events()[-1].prefill_worker) == (1, "p1")
        await until(lambda: holds_nothing(prefill, spare, decode), timeout_s=FOUND_S + BUSY_S)
        await until(gateway.idle, what="an idle gateway")
        proxy.forwards.set()
        assert answer.json()["choices"] == (await gateway.complete(TOKENS, **body)).json()["choices"]
