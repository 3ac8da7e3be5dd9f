"""Tests that kill every process of a suite by SIGKILL under load: clients of other gateways notice nothing."""

import asyncio
from collections.abc import Collection
from random import Random
from typing import Any

import httpx
import pytest

from libs.contracts.metric_names import WORKER_DROPPED_BATCHES
from libs.testing.suites.processes import (
    frozen,
    gateway_metrics,
    kept_down,
    kill,
    leftovers,
    pid_of,
    set_role,
    until_whole,
    workers,
)
from libs.testing.suites.steady_load import SteadyLoad, steady_load
from libs.testing.suites.suite import RunningSuite
from libs.testing.wait import until

pytestmark = [pytest.mark.alone, pytest.mark.suite]

BACK_S = 30.0
IDLE_S = 20.0
TOKENS = 16
NAMES = ("redis", "decode-1", "kafka", "gateway-2", "metrics", "prefill-2", "planner")
SPARES = ("gateway-1", "decode-2", "prefill-1")
"""With NAMES, every process of the suite."""
MOVE_S = 5.0
"""Bound on a role move, which takes milliseconds and must not wait for stores."""


async def until_idle(http: httpx.AsyncClient, suite: RunningSuite) -> None:
    """Fail with what is left of requests that have all ended."""
    left = ["?"]
    try:
        async with asyncio.timeout(IDLE_S):
            while left := await leftovers(http, suite):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"left at idle: {left}") from None


def is_spare_down(name: str, down: Collection[str]) -> bool:
    """Return whether no other process of its kind is known to be up."""
    return any(other.split("-")[0] == name.split("-", maxsplit=1)[0] for other in down if "-" in other)


async def test_clients_of_other_gateways_notice_nothing_when_a_whole_set_of_processes_is_killed(
    suite: RunningSuite,
) -> None:
    """One gateway, one worker of each kind, both stores, planner and metrics."""
    async with httpx.AsyncClient(timeout=10) as http:
        async with steady_load(suite.ready["gateways"][:1], tokens=TOKENS) as load:
            await load.more(16)
            for name in NAMES:
                await kill(suite, name)
            await load.more(16)
            assert (load.failed, load.broken) == ([], 0)
            await until_whole(http, suite)
            await until_covered(http, suite)  # planner and metrics have all their earlier state
        await until_idle(http, suite)


@pytest.mark.faults
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_processes_killed_in_any_order_fail_no_request_and_leave_nothing(suite: RunningSuite, seed: int) -> None:
    """Every process once, while earlier ones are still restarting, except the last one of a kind."""
    order = Random(seed).sample(NAMES + SPARES, len(NAMES + SPARES))
    async with httpx.AsyncClient(timeout=10) as http:
        async with steady_load(suite.ready["gateways"], clients=4, tokens=TOKENS) as load:
            await load.more(8)
            down: dict[str, int] = {}
            for name in order:
                if is_spare_down(name, down):
                    await until_whole(http, suite)
                    down.clear()
                broken = load.broken
                down[name] = await kill(suite, name)
                await load.more(8)
                assert load.failed == [], f"{name} of {order}"
                assert load.broken == broken or any(each.startswith("gateway") for each in down), f"{name} of {order}"
            await until_whole(http, suite)
            assert all(pid_of(suite, name) != pid for name, pid in down.items())
            await until_covered(http, suite)
        await until_idle(http, suite)


LOST_S = 3.5
"""Time without a broker: the buffer of 20 records is full after 2 s."""
BATCH_S = 0.1
"""GPU time that a record of telemetry covers; each worker has one GPU."""
MOST_OF_IT = 0.8
"""The share of lost time that must be shown as unknown: window boundaries are rounded to tenths of a second."""


@pytest.mark.parametrize(
    "stores",
    [
        ("kafka", "redis"),
        pytest.param(("kafka",), marks=pytest.mark.faults),
        pytest.param(("redis",), marks=pytest.mark.faults),
    ],
    ids=" and ".join,
)
async def test_without_stores_workers_may_die_and_change_roles_and_requests_continue(
    suite: RunningSuite, stores: tuple[str, ...]
) -> None:
    """Telemetry that does not fit into its buffer is shown as unknown, never as idle."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(timeout=10) as http:
        await until_whole(http, suite)
        moved = next(worker for worker in await workers(http, suite) if worker["id"] == "decode-2")
        async with steady_load(suite.ready["gateways"], clients=4, tokens=TOKENS) as load:
            await load.more(4)
            down_s = loop.time()
            async with kept_down(suite, *stores):
                await load.more(4)
                gone_s = loop.time()
                async with asyncio.timeout(MOVE_S):
                    epoch = await set_role(suite, moved["address"], moved["epoch"], "mixed", 64)
                assert epoch == moved["epoch"] + 1
                await kill(suite, "decode-1")
                await load.more(4)
                async with asyncio.timeout(MOVE_S):
                    assert await set_role(suite, moved["address"], epoch, "decode") == epoch + 1
                await assert_silence_is_noticed(http, suite, load)
                await until(lambda: loop.time() > gone_s + LOST_S, what="a loss of telemetry")
            await load.more(4)
            await until_whole(http, suite)
            if "kafka" in stores:
                await assert_loss_is_shown(http, suite, down_s)
        assert (load.failed, load.broken) == ([], 0)
        await until_idle(http, suite)


async def assert_silence_is_noticed(http: httpx.AsyncClient, suite: RunningSuite, load: SteadyLoad) -> None:
    """A frozen worker is given up although no store reports it as gone."""

    async def silences() -> float:
        return sum([(await gateway_metrics(http, url))["silences_total"] for url in suite.ready["gateways"]])

    before, pid = await silences(), pid_of(suite, "prefill-1")
    assert pid is not None
    async with frozen(pid), asyncio.timeout(BACK_S):
        while await silences() == before:
            await asyncio.sleep(0.05)
        await load.more(4)


async def until_covered(http: httpx.AsyncClient, suite: RunningSuite) -> None:
    """Wait until every worker's time is known again."""
    async with asyncio.timeout(BACK_S):
        while True:
            known = await occupancy(http, suite, 1)
            if known["coverage"] >= 0.99 and known["gpus"] == suite.workers:
                return
            await asyncio.sleep(0.1)


async def assert_loss_is_shown(http: httpx.AsyncClient, suite: RunningSuite, since_s: float) -> None:
    await until_covered(http, suite)
    window_s = asyncio.get_running_loop().time() - since_s
    known = await occupancy(http, suite, window_s)
    assert known["idle"] < 0.9
    assert sum(known[phase] for phase in ("prefill", "decode", "kv_wait", "idle")) == pytest.approx(1)
    metrics = (await http.get(f"{suite.ready['metrics']}/metrics")).text
    lost = [line for line in metrics.splitlines() if line.startswith(WORKER_DROPPED_BATCHES)]
    lost_s = sum(float(line.rsplit(" ", 1)[1]) for line in lost) * BATCH_S
    covered_s = known["gpu_ns"]["covered"] / 1e9
    unknown_s = covered_s / known["coverage"] - covered_s
    assert 0 < lost_s < unknown_s / MOST_OF_IT


async def occupancy(http: httpx.AsyncClient, suite: RunningSuite, window_s: float) -> dict[str, Any]:
    answer = await http.get(f"{suite.ready['metrics']}/v1/occupancy", params={"window": f"{window_s:.1f}s"})
    found: dict[str, Any] = answer.json()
    return found
