"""Tests of a pool's workers that share GPUs, and of how the planner counts them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

WAIT_S = 60.0
ENV = {"FULCRUM_PLANNER_MODE": "auto", "FULCRUM_WORKER_SIM_SPEEDUP": "10", "FULCRUM_PLANNER_MODELS_TURN_S": "600"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("shared")
    shape = ("--engine", "sim", "--pool", "2", "--workers-per-gpu", "2", "--model", "alpha", "--model", "beta")
    with running_suite(folder, *shape, env={"FULCRUM_CACHE": str(folder / "cache"), **ENV}) as found:
        yield found


async def ask(http: httpx.AsyncClient, suite: RunningSuite, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "a b c", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    return await http.post(f"{suite.gateway}/v1/completions", json=body)


async def catalogue(http: httpx.AsyncClient, suite: RunningSuite) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(f"{suite.ready['planner']}/v1/models")).json()
    return found


async def test_two_models_are_served_from_one_gpu_at_once_and_it_counts_once(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answers = await asyncio.gather(*(ask(http, suite, name) for name in ("alpha", "beta") * 3))
        assert [each.status_code for each in answers] == [200] * 6
        found = await catalogue(http, suite)
        assert {each["name"]: each["state"] for each in found["models"]} == {"alpha": "serving", "beta": "serving"}
        assert (found["gpus"], found["devices"]) == (2, 1)
        assert found["switches"].get("turn", 0) == 0
        workers = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
        assert len({each["pid"] for each in workers}) == 1 and len({each["id"] for each in workers}) == 2


async def test_a_model_that_fits_the_gpu_but_no_worker_is_503_with_the_reason(
    suite: RunningSuite, tmp_path: Path
) -> None:
    assert suite.fulcrum("models", "add", "large", "--size", "60GB").returncode == 0
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (answer := await ask(http, suite, "large")).status_code == 404:
                await asyncio.sleep(0.05)
        assert answer.status_code == 503
        assert "60.0 GB of weights, no worker more than 40.0 GB" in answer.json()["error"]["message"]
    assert suite.fulcrum("models", "remove", "large").returncode == 0
