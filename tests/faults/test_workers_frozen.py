"""Tests of workers frozen by SIGSTOP at every stage of a whole suite: no answer changes."""

import asyncio
import uuid
from collections.abc import Callable

import httpx
import pytest

from libs.testing.suites.processes import frozen, gateway_metrics, until_whole, workers
from libs.testing.suites.steady_load import Streamed, stream
from libs.testing.suites.suite import RunningSuite

pytestmark = [pytest.mark.alone, pytest.mark.suite]

REQUESTS = 8
NOTICED_S = 0.5
"""A frozen worker is routed around within this time."""
BUSY_S = 1.0
"""Time that a busy machine may add, apart from the gateway's own delay."""
LONG = ("p" * 1500, 4)
SHORT = ("p", 40)
"""Prompt and output tokens."""
STAGES = {
    "prefill": ("prefill", LONG, 0.15),
    "stream": ("decode", SHORT, 0.7),
    "kv pull, its source": ("prefill", LONG, 0.7),
    "kv pull, its receiver": ("decode", LONG, 0.7),
}
"""The process to freeze, the request, and the delay between request and freeze."""


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, int], list[Streamed]]:
    """The answers without a frozen worker, by request."""
    return {}


async def ask_all(http: httpx.AsyncClient, suite: RunningSuite, prompt: str, tokens: int) -> list[Streamed]:
    """Send the same requests at each call, none of which finds its prefix cached."""
    tenant = uuid.uuid4().hex
    body = {"model": "sim", "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    streams = (
        stream(http, suite.gateway, tenant=tenant, **body, prompt=f"{number} {prompt}", seed=number)
        for number in range(REQUESTS)
    )
    return await asyncio.gather(*streams)


def lasted_s(answers: list[Streamed]) -> float:
    return max(each.came_s[-1] - each.requested_s for each in answers)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
async def test_a_frozen_worker_is_routed_around(
    suite: RunningSuite,
    undisturbed: dict[tuple[str, int], list[Streamed]],
    stage: tuple[str, tuple[str, int], float],
    record_property: Callable[[str, object], None],
) -> None:
    role, requested, after_s = stage
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        if requested not in undisturbed:
            undisturbed[requested] = await ask_all(http, suite, *requested)
        expected = undisturbed[requested]
        before = await gateway_metrics(http, suite.gateway)
        pid = next(worker["pid"] for worker in await workers(http, suite) if worker["role"] == role)
        asking = asyncio.ensure_future(ask_all(http, suite, *requested))
        await asyncio.wait([asking], timeout=after_s)
        assert not asking.done()
        async with frozen(pid):
            answers = await asyncio.wait_for(asking, 60)
        assert [each.text for each in answers] == [each.text for each in expected]
        assert [each.usage for each in answers] == [each.usage for each in expected]
        assert all(each.done and each.finish_reason == "length" for each in answers)

        now = await gateway_metrics(http, suite.gateway)
        assert (now["live"], now["waiting"]) == (0, 0)
        assert now["silences_total"] > before["silences_total"]  # a starved machine may add others
        late_s = now["late_seconds_total"] - before["late_seconds_total"]
        # Half of the workers of a role are frozen, so their part takes twice as long.
        assert lasted_s(answers) < 2 * lasted_s(expected) + NOTICED_S + BUSY_S + late_s
        gap_s = max(each.longest_gap_s for each in answers) - max(each.longest_gap_s for each in expected)
        record_property("gap_s", round(gap_s, 3))
        assert requested is LONG or gap_s < NOTICED_S + BUSY_S + late_s
