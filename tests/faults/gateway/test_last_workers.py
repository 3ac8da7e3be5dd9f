"""Tests with real processes of the loss of a role's last worker."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from libs.testing.suites.processes import frozen, gateway_metrics, kept_down, leftovers, pid_of, until_whole
from libs.testing.suites.steady_load import Streamed, stream
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.faults]

NO_WORKERS_MS = 1500
WAITING = 6
"""The capacity of the queue in choices."""
MAX_SILENT_MS = 1000
BUSY_S = 5.0
STREAMS = 4
TOKENS = 120
BODY = {"model": "sim", "temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """One worker of each role, slow enough to be killed in mid-stream."""
    env = {
        "FULCRUM_WORKER_SIM_SPEEDUP": "0.5",
        "FULCRUM_GATEWAY_NO_WORKERS_WAIT_MS": str(NO_WORKERS_MS),
        "FULCRUM_GATEWAY_MAX_WAITING": str(WAITING),
        "FULCRUM_GATEWAY_MAX_SILENT_MS": str(MAX_SILENT_MS),
    }
    with running_suite(tmp_path_factory.mktemp("suite"), "--engine", "sim", env=env) as found:
        yield found


async def streams(http: httpx.AsyncClient, suite: RunningSuite, into: list[Streamed]) -> None:
    """Send the same requests at each call, none of which finds its prefix cached."""
    tenant = uuid.uuid4().hex
    sent = (
        stream(
            http,
            suite.gateway,
            into=answer,
            tenant=tenant,
            prompt=f"{number} and",
            seed=number,
            max_tokens=TOKENS,
            **BODY,
        )
        for number, answer in enumerate(into)
    )
    await asyncio.gather(*sent)


def answers() -> list[Streamed]:
    return [Streamed(0.0) for _ in range(STREAMS)]


@pytest.mark.parametrize("gone", ["prefill-1", "decode-1"])
async def test_after_a_loss_streams_end_and_requests_wait_a_bounded_time_until_a_new_worker_joins(
    suite: RunningSuite, gone: str
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        expected, found = answers(), answers()
        await streams(http, suite, expected)
        asking = asyncio.ensure_future(streams(http, suite, found))
        await until(lambda: all(len(each.came_s) > 3 for each in found), timeout_s=30, what="streams")
        async with kept_down(suite, gone):
            async with asyncio.timeout(NO_WORKERS_MS / 1000 + TOKENS * 0.1 + BUSY_S):
                await asking
            for answer, unbroken in zip(found, expected, strict=True):
                if gone.startswith("prefill"):
                    assert (answer.text, answer.usage, answer.done) == (unbroken.text, unbroken.usage, True)
                else:
                    assert unbroken.text.startswith(answer.text) and answer.text
                    assert answer.error is not None and answer.error["code"] == "no_workers"
            await assert_bounded(http, suite)
        await until_whole(http, suite)
        again = answers()
        await streams(http, suite, again)
        assert [each.text for each in again] == [each.text for each in expected]
        async with asyncio.timeout(BUSY_S):
            while await leftovers(http, suite):
                await asyncio.sleep(0.05)


async def test_a_frozen_single_decode_worker_ends_its_streams_and_is_used_again_once_it_thaws(
    suite: RunningSuite,
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        before = await gateway_metrics(http, suite.gateway)
        pid = pid_of(suite, "decode-1")
        assert pid is not None
        found = answers()
        asking = asyncio.ensure_future(streams(http, suite, found))
        await until(lambda: all(len(each.came_s) > 3 for each in found), timeout_s=30, what="streams")
        async with frozen(pid):
            async with asyncio.timeout((MAX_SILENT_MS + NO_WORKERS_MS) / 1000 + BUSY_S):
                await asking
            assert all(each.error is not None and each.error["code"] == "no_workers" for each in found)
            await assert_bounded(http, suite)
            assert (await gateway_metrics(http, suite.gateway))["silences_total"] > before["silences_total"]
        await until_whole(http, suite)
        again = answers()
        await streams(http, suite, again)
        assert all(each.done for each in again)


async def assert_bounded(http: httpx.AsyncClient, suite: RunningSuite) -> None:
    """Send more than the queue takes: some are refused at once, and those that wait soon after."""

    async def ask() -> tuple[httpx.Response, float]:
        began_s = asyncio.get_running_loop().time()
        body: dict[str, Any] = {**BODY, "prompt": "hello", "max_tokens": 3}
        answer = await http.post(f"{suite.gateway}/v1/completions", json=body)
        return answer, asyncio.get_running_loop().time() - began_s

    found = await asyncio.gather(*(ask() for _ in range(2 * WAITING)))
    shown = [(answer.status_code, answer.json()["error"]["code"]) for answer, _ in found]
    assert shown.count((503, "no_workers")) == shown.count((429, "queue_full")) == WAITING
    assert all(int(answer.headers["retry-after"]) >= 1 for answer, _ in found)
    assert max(waited_s for _, waited_s in found) < NO_WORKERS_MS / 1000 + BUSY_S
