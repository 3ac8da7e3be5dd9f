"""Tests of a pool at its limits: cold models, answers cut by a turn, full host memory and broken weights."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite]

WAIT_S = 90.0
TIGHT = {
    "FULCRUM_PLANNER_MODE": "auto",
    "FULCRUM_PLANNER_MODELS_TURN_S": "1",
    "FULCRUM_WORKER_SIM_LOAD_GB_PER_S": "64",
    "FULCRUM_WORKER_SIM_LOAD_OVERHEAD_S": "0.1",
    "FULCRUM_WORKER_POOL_DRAIN_S": "0",
    "FULCRUM_WORKER_HOST_MEMORY_MB": "20000",
}
"""One worker, host memory for one model of 16 GB, and turns whose end hands running answers back."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("pool")
    models = [word for name in ("alpha", "beta", "gamma") for word in ("--model", name)]
    shape = ("--engine", "sim", "--pool", "1", *models)
    with running_suite(folder, *shape, env={"FULCRUM_CACHE": str(folder / "cache"), **TIGHT}) as found:
        yield found


def body(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "a b c", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def ask(http: httpx.AsyncClient, suite: RunningSuite, model: str, tokens: int = 4) -> httpx.Response:
    return await http.post(f"{suite.gateway}/v1/completions", json=body(model, tokens))


async def test_answers_cut_by_a_turn_are_completed_later_unchanged(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        alone = (await ask(http, suite, "alpha", 600)).json()["choices"][0]["text"]
        both = await asyncio.gather(*(ask(http, suite, name, 600) for name in ("alpha", "beta", "alpha")))
    assert [each.status_code for each in both] == [200] * 3, [each.text for each in both]
    assert [each.json()["usage"]["completion_tokens"] for each in both] == [600] * 3
    assert [both[place].json()["choices"][0]["text"] for place in (0, 2)] == [alone] * 2


async def test_batch_lines_wake_models_that_no_worker_has(suite: RunningSuite) -> None:
    lines = [
        json.dumps({"custom_id": f"{name}-{n}", "method": "POST", "url": "/v1/completions", "body": body(name, 4)})
        for n in range(3)
        for name in ("beta", "gamma")
    ]
    async with httpx.AsyncClient(timeout=WAIT_S, base_url=suite.gateway) as http:
        assert (await ask(http, suite, "alpha")).status_code == 200
        uploaded = await http.post(
            "/v1/files", files={"file": ("lines.jsonl", "\n".join(lines))}, data={"purpose": "batch"}
        )
        job = {
            "input_file_id": uploaded.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        found = (await http.post("/v1/batches", json=job)).json()
        async with asyncio.timeout(WAIT_S):
            while found["status"] not in ("completed", "failed", "expired"):
                await asyncio.sleep(0.1)
                found = (await http.get(f"/v1/batches/{found['id']}")).json()
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 6, "completed": 6, "failed": 0}


async def test_a_full_host_memory_evicts_the_model_left_longest_ago_and_loses_no_answer(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        for name in ("alpha", "beta", "gamma", "alpha"):
            assert (await ask(http, suite, name)).status_code == 200
        async with asyncio.timeout(WAIT_S):
            while True:
                models = (await http.get(f"{suite.ready['planner']}/v1/models")).json()["models"]
                states = {each["name"]: each["state"] for each in models}
                if states == {"alpha": "serving", "beta": "disk", "gamma": "asleep"}:
                    break
                assert states["beta"] != "asleep" or states["gamma"] != "asleep"
                await asyncio.sleep(0.05)


async def test_broken_weights_are_503_with_the_reason_and_the_others_continue(
    suite: RunningSuite, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    added = suite.fulcrum("models", "add", "broken", "--source", str(broken), "--size", "1GB")
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        if added.returncode:
            assert "config.json" in added.stderr
        else:
            async with asyncio.timeout(WAIT_S):
                while (answer := await ask(http, suite, "broken")).status_code == 404:
                    await asyncio.sleep(0.05)
            assert answer.status_code == 503
            assert "cannot be served here" in answer.text and "config.json" in answer.text
        assert (await ask(http, suite, "beta")).status_code == 200
