"""Every process of a suite killed by SIGKILL under load, one after another: clients of other gateways never notice."""

import asyncio

import httpx
import pytest

from libs.contracts.metric_names import WORKER_DROPPED_BATCHES
from libs.testing.processes import gateway_metrics, keep_down, kill, leftovers, pid_of, set_role, workers
from libs.testing.steady_load import SteadyLoad, steady_load
from libs.testing.suite import Suite

pytestmark = pytest.mark.suite

BACK_S = 30.0
IDLE_S = 10.0
NAMES = ("redis", "decode-1", "kafka", "gateway-2", "metrics", "prefill-2", "planner")


async def whole(http: httpx.AsyncClient, suite: Suite) -> bool:
    """Whether every part is back and knows of all others."""
    try:
        for url in suite.ready["gateways"]:
            if (await gateway_metrics(http, url))["workers"] < 4:
                return False
        for service in ("planner", "metrics"):
            if (await http.get(f"{suite.ready[service]}/readyz")).status_code != httpx.codes.OK:
                return False
        return len(await workers(http, suite)) == 4
    except httpx.TransportError:
        return False


async def until_whole(http: httpx.AsyncClient, suite: Suite) -> None:
    async with asyncio.timeout(BACK_S):
        while not await whole(http, suite):
            await asyncio.sleep(0.05)


async def until_idle(http: httpx.AsyncClient, suite: Suite) -> None:
    """Fails with what is left of requests that have all ended."""
    left = ["?"]
    try:
        async with asyncio.timeout(IDLE_S):
            while left := await leftovers(http, suite):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"left at idle: {left}") from None


async def kill_under(load: SteadyLoad, http: httpx.AsyncClient, suite: Suite, name: str) -> None:
    broken = load.broken
    pid = await kill(suite, name)
    await load.more(16)
    await until_whole(http, suite)
    assert pid_of(suite, name) != pid
    assert load.failed == []
    assert name.startswith("gateway") or load.broken == broken


async def test_of_all_that_is_killed_at_once_clients_of_the_rest_notice_nothing(suite: Suite) -> None:
    """One gateway, one worker of each kind, both stores, planner and metrics."""
    async with httpx.AsyncClient(timeout=10) as http:
        async with steady_load(suite.ready["gateways"][:1]) as load:
            await load.more(16)
            for name in NAMES:
                await kill(suite, name)
            await load.more(16)
            assert (load.failed, load.broken) == ([], 0)
        await until_whole(http, suite)
        await until_idle(http, suite)


@pytest.mark.faults
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1], NAMES[1::2] + NAMES[::2]], ids=["one", "backwards", "mixed"])
async def test_in_any_order_no_request_fails_and_nothing_is_left(suite: Suite, order: tuple[str, ...]) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        async with steady_load(suite.ready["gateways"], clients=4) as load:
            await load.more(8)
            for name in order:
                await kill_under(load, http, suite, name)
        await until_idle(http, suite)


async def occupancy(http: httpx.AsyncClient, suite: Suite, window_s: float) -> dict[str, float]:
    found: dict[str, float] = (
        await http.get(f"{suite.ready['metrics']}/v1/occupancy", params={"window": f"{window_s:g}s"})
    ).json()
    return found


async def test_a_broker_that_is_down_costs_coverage_and_no_request(suite: Suite) -> None:
    """What does not fit into the buffer of 20 records, 2 s, is shown as not known, never as idle."""
    async with httpx.AsyncClient(timeout=10) as http:
        async with steady_load(suite.ready["gateways"], clients=4) as load:
            await load.more(8)
            await asyncio.wait_for(keep_down(suite, "kafka", 5.0), 10)
            await load.more(16)
            await until_whole(http, suite)
            async with asyncio.timeout(BACK_S):
                while (await occupancy(http, suite, 1))["coverage"] < 0.99:
                    await asyncio.sleep(0.1)
            known = await occupancy(http, suite, 15)
            metrics = (await http.get(f"{suite.ready['metrics']}/metrics")).text
        assert (load.failed, load.broken) == ([], 0)
        assert 0 < known["coverage"] < 0.95
        assert known["idle"] < 0.9
        assert sum(known[phase] for phase in ("prefill", "decode", "kv_wait", "idle")) == pytest.approx(1)
        lost = [line for line in metrics.splitlines() if line.startswith(WORKER_DROPPED_BATCHES)]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lost) > 0
        await until_idle(http, suite)


async def test_without_redis_workers_may_die_and_change_roles_and_requests_go_on(suite: Suite) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        moved = next(worker for worker in await workers(http, suite) if worker["id"] == "decode-2")
        async with steady_load(suite.ready["gateways"], clients=4) as load:
            await load.more(8)
            down = asyncio.create_task(keep_down(suite, "redis", 4.0))
            await load.more(8)
            epoch = await set_role(suite, moved["address"], moved["epoch"], "mixed", 64)
            assert epoch == moved["epoch"] + 1
            await load.more(8)
            await kill(suite, "decode-1")
            await load.more(8)
            assert await set_role(suite, moved["address"], epoch, "decode") == epoch + 1
            await down
            await load.more(8)
            await until_whole(http, suite)
        assert (load.failed, load.broken) == ([], 0)
        await until_idle(http, suite)
