"""Workers frozen by SIGSTOP at every stage, in a whole suite: clients hardly notice, and no answer changes."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from libs.testing.streams import Streamed, stream
from libs.testing.suite import Suite, running_suite

pytestmark = pytest.mark.suite

REQUESTS = 8
NOTICED_S = 0.5
"""A frozen worker is routed round within this time."""
BUSY_S = 0.5
"""What a busy machine may take on top of what should be."""
BACK_S = 20.0
SLOW = {"FULCRUM_WORKER_SIM_SPEEDUP": "0.25", "FULCRUM_WORKER_SIM_LINK_GBPS": "40"}
"""A long prompt takes 0.2 s to compute, and about as long to pull."""
LONG = ("p" * 1500, 4)
SHORT = ("p", 60)
"""Prompt and output tokens."""
STAGES = {
    "prefill": ("prefill", LONG, 0.15),
    "stream": ("decode", SHORT, 1.2),
    "kv pull, its source": ("prefill", LONG, 0.7),
    "kv pull, its receiver": ("decode", LONG, 0.7),
}
"""Whose process, what is asked, and how long after it was asked the process is frozen."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    shape = ("--engine", "sim", "--prefill", "2", "--decode", "2")
    with running_suite(tmp_path_factory.mktemp("suite"), *shape, env=SLOW) as found:
        yield found


async def ask_all(http: httpx.AsyncClient, suite: Suite, prompt: str, tokens: int) -> list[Streamed]:
    """The same requests at each call, none of which finds its prefix cached."""
    tenant = uuid.uuid4().hex
    body = {"model": "sim", "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    asked = (
        stream(http, suite.gateway, tenant=tenant, **body, prompt=f"{number} {prompt}", seed=number)
        for number in range(REQUESTS)
    )
    return await asyncio.gather(*asked)


async def metrics(http: httpx.AsyncClient, suite: Suite) -> dict[str, float]:
    """The gateway's metrics that have no labels."""
    lines = (await http.get(f"{suite.gateway}/metrics")).text.splitlines()
    pairs = (line.removeprefix("fulcrum_gateway_").split(" ") for line in lines if "{" not in line and line[0] != "#")
    return {name: float(value) for name, value in pairs}


async def workers(http: httpx.AsyncClient, suite: Suite) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
    return found


@contextlib.asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def lasted_s(answers: list[Streamed]) -> float:
    return max(each.came_s[-1] - each.asked_s for each in answers)


@pytest.mark.parametrize(("role", "asked", "after_s"), STAGES.values(), ids=STAGES.keys())
async def test_a_frozen_worker_is_routed_round(
    suite: Suite, role: str, asked: tuple[str, int], after_s: float, record_property: Callable[[str, object], None]
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        expected = await ask_all(http, suite, *asked)
        silences = (await metrics(http, suite))["silences_total"]
        pid = next(worker["pid"] for worker in await workers(http, suite) if worker["role"] == role)
        asking = asyncio.ensure_future(ask_all(http, suite, *asked))
        await asyncio.wait([asking], timeout=after_s)
        assert not asking.done()
        async with frozen(pid):
            answers = await asyncio.wait_for(asking, 20)
        assert [each.text for each in answers] == [each.text for each in expected]
        assert [each.usage for each in answers] == [each.usage for each in expected]
        assert all(each.done and each.finish_reason == "length" for each in answers)
        # Half of the workers of a role are gone: what is computed there takes twice as long.
        assert lasted_s(answers) < 2 * lasted_s(expected) + NOTICED_S + BUSY_S
        gap_s = max(each.longest_gap_s for each in answers) - max(each.longest_gap_s for each in expected)
        record_property("gap_s", round(gap_s, 3))
        assert asked is LONG or gap_s < NOTICED_S + BUSY_S

        async with asyncio.timeout(BACK_S):
            while (now := await metrics(http, suite))["workers"] < 4:
                await asyncio.sleep(0.05)
        assert (now["live"], now["waiting"]) == (0, 0)
        assert now["silences_total"] == silences + 1
