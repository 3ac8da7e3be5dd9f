"""Tests of failures while models are loaded: no request is lost, and errors name their reason."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite]

SLOW_LOADS = {
    "FULCRUM_PLANNER_MODE": "auto",
    "FULCRUM_WORKER_SIM_LOAD_GB_PER_S": "4",
    "FULCRUM_GATEWAY_MAX_MODEL_WAIT_MS": "18000",
}
WAIT_S = 60.0


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("pool")
    models = [word for name in ("alpha", "beta", "gamma") for word in ("--model", name)]
    shape = ("--engine", "sim", "--pool", "2", *models)
    with running_suite(folder, *shape, env={"FULCRUM_CACHE": str(folder / "cache"), **SLOW_LOADS}) as found:
        yield found


async def ask(http: httpx.AsyncClient, suite: RunningSuite, model: str, tokens: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": "a b c", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return await http.post(f"{suite.gateway}/v1/completions", json=body)


async def workers(http: httpx.AsyncClient, suite: RunningSuite) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
    return found


async def loading(http: httpx.AsyncClient, suite: RunningSuite, model: str) -> dict[str, Any]:
    """Return the worker that loads a model, as soon as one does."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for each in await workers(http, suite):
                if (each["state"], each["model"]) == ("loading", model):
                    return each
            await asyncio.sleep(0.02)


async def test_a_worker_killed_while_it_loads_costs_time_and_no_request(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        requests = [asyncio.ensure_future(ask(http, suite, "alpha")) for _ in range(3)]
        os.kill((await loading(http, suite, "alpha"))["pid"], signal.SIGKILL)
        answers = await asyncio.gather(*requests)
    assert [each.status_code for each in answers] == [200] * 3
    assert all(each.json()["usage"]["completion_tokens"] == 4 for each in answers)


async def test_a_model_removed_while_it_is_requested_is_404_and_its_running_requests_end(
    suite: RunningSuite,
) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        assert (await ask(http, suite, "alpha")).status_code == 200
        running = asyncio.ensure_future(ask(http, suite, "alpha", tokens=300))
        assert suite.fulcrum("models", "add", "doomed", "--size", "60GB").returncode == 0
        async with asyncio.timeout(WAIT_S):
            while (await http.get(f"{suite.gateway}/v1/models/doomed")).status_code == 404:
                await asyncio.sleep(0.02)
        requests = [asyncio.ensure_future(ask(http, suite, "doomed")) for _ in range(3)]
        await loading(http, suite, "doomed")
        assert suite.fulcrum("models", "remove", "doomed").returncode == 0
        for answer in await asyncio.gather(*requests):
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == "model 'doomed' was removed while the request waited for it"
        assert (await running).json()["usage"]["completion_tokens"] == 300
        assert (await ask(http, suite, "doomed")).status_code == 404


async def test_a_model_that_no_worker_has_memory_for_is_503_with_the_reason_and_the_others_continue(
    suite: RunningSuite,
) -> None:
    assert suite.fulcrum("models", "add", "huge", "--size", "141GB").returncode == 0
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (await http.get(f"{suite.gateway}/v1/models/huge")).status_code == 404:
                await asyncio.sleep(0.02)
        answer = await ask(http, suite, "huge")
        assert answer.status_code == 503
        assert "141.0 GB of weights, no worker more than 80.0 GB of memory" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        again = await asyncio.gather(*(ask(http, suite, name) for name in ("alpha", "beta")))
        assert [each.status_code for each in again] == [200, 200]
        shown = suite.fulcrum("models", "list")
        assert "huge cannot be loaded" in shown.stdout
        assert suite.fulcrum("models", "remove", "huge").returncode == 0


async def test_a_model_that_loads_longer_than_requests_wait_is_503_and_ready_after_retry_after(
    suite: RunningSuite,
) -> None:
    # 80 GB at 4 GB/s and half a second: as long as a request may wait, and a little more once another is put away.
    assert suite.fulcrum("models", "add", "large", "--size", "79GB").returncode == 0
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (await http.get(f"{suite.gateway}/v1/models/large")).status_code == 404:
                await asyncio.sleep(0.02)
        answer = await ask(http, suite, "large")
        if answer.status_code == 503:
            await asyncio.sleep(int(answer.headers["retry-after"]))
            answer = await ask(http, suite, "large")
        assert answer.status_code == 200
        assert suite.fulcrum("models", "remove", "large").returncode == 0
