"""Test of `fulcrum up --spare`: the planner starts and ends spare workers."""

import asyncio
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from libs.testing.suites.suite import RunningSuite, running_suite

WAIT_S = 60.0
CLIENTS = 24
FULL = {
    "FULCRUM_PLANNER_MODE": "auto",
    "FULCRUM_WORKER_SIM_PROFILE": "llama-70b-tp4-h100",
    "FULCRUM_PLANNER_START_UP_S": "2",
}


async def load(suite: RunningSuite, client: int, until: asyncio.Event, failed: list[str]) -> None:
    """Send long prompts without common prefixes, one after another."""
    async with httpx.AsyncClient(timeout=120) as http:
        for number in count():
            if until.is_set():
                return
            body = {"model": suite.ready["model"], "prompt": f"{client} {number} " + "word " * 1500, "max_tokens": 4}
            answer = await http.post(f"{suite.gateway}/v1/completions", json=body)
            if answer.status_code not in (200, 429):
                failed.append(answer.text[:200])
            await asyncio.sleep(0 if answer.status_code == 200 else 0.2)


async def until_serving(suite: RunningSuite, name: str) -> list[dict[str, Any]]:
    url, since_s = suite.ready["planner"], time.monotonic()
    async with httpx.AsyncClient(timeout=10) as http:
        while time.monotonic() < since_s + WAIT_S:
            workers = {each["id"]: each for each in (await http.get(f"{url}/v1/workers")).json()}
            if name in workers and workers[name]["role"] not in ("standby", ""):
                found: list[dict[str, Any]] = (await http.get(f"{url}/v1/decisions", params={"limit": 1000})).json()
                return found
            await asyncio.sleep(0.2)
        decided = (await http.get(f"{url}/v1/decisions", params={"limit": 5})).json()
    raise AssertionError(f"{name} serves nobody: {sorted(workers)}, {[each['reason'] for each in decided]}")


async def flood(suite: RunningSuite) -> tuple[list[dict[str, Any]], list[str]]:
    enough, failed = asyncio.Event(), list[str]()
    clients = [asyncio.create_task(load(suite, client, enough, failed)) for client in range(CLIENTS)]
    try:
        return await until_serving(suite, "spare-1"), failed
    finally:
        enough.set()
        await asyncio.gather(*clients)


def test_a_spare_worker_serves_once_no_split_of_the_others_has_room(tmp_path: Path) -> None:
    with running_suite(tmp_path, "--engine", "sim", "--spare", "1", env=FULL) as suite:
        decisions, failed = asyncio.run(flood(suite))
        assert failed == []
        (*_, scale) = [each for each in decisions if each["action"] == "scale"]  # the first of them
        assert scale["reason_code"] == "too_small" and "wished" in scale["reason"]
        called = [each for each in decisions if each["action"] == "set_role" and "spare-1" in each["workers"]]
        assert called
