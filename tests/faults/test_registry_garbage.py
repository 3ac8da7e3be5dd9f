"""Test of garbage in Redis's set of workers: a running suite keeps serving, and restarted services start."""

import httpx
import pytest
from redis.asyncio import Redis

from libs.contracts import keys
from libs.testing.suites.processes import gateway_metrics, kill, until_whole
from libs.testing.suites.suite import RunningSuite

pytestmark = pytest.mark.suite

MEMBERS = (b"\xff\xfe", b"", b"decode 9", b"\x80" * 200)


async def ask(http: httpx.AsyncClient, url: str) -> int:
    body = {"model": "sim", "prompt": "hello", "max_tokens": 2}
    return (await http.post(f"{url}/v1/completions", json=body)).status_code


async def test_gateways_and_planner_survive_and_start_despite_invalid_worker_entries(suite: RunningSuite) -> None:
    cluster, urls = suite.ready["cluster"], suite.ready["gateways"]
    store: Redis = Redis.from_url(suite.ready["redis"])
    leases = [keys.worker(cluster, "").encode() + member for member in MEMBERS]
    try:
        async with httpx.AsyncClient(timeout=60) as http:
            await until_whole(http, suite)
            for lease in leases:
                await store.hset(lease, mapping={"worker": b"\xff\xff", "incarnation": "1"})
            await store.sadd(keys.workers(cluster), *MEMBERS)
            await store.publish(keys.worker_changes(cluster), b"\xff")
            for name in ("gateway-1", "planner"):
                await kill(suite, name)
            await until_whole(http, suite)
            assert [await ask(http, url) for url in urls] == [200] * len(urls)
            for url in urls:
                metrics = await gateway_metrics(http, url)
                assert metrics["fulcrum_registry_unusable_entries"] == len(MEMBERS)
            shown = (await http.get(f"{suite.ready['planner']}/metrics")).text
            assert f"fulcrum_registry_unusable_entries {len(MEMBERS)}.0" in shown
    finally:
        await store.unlink(*leases)
        await store.srem(keys.workers(cluster), *MEMBERS)
        await store.aclose()
