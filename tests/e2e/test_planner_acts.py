"""Tests of a running suite whose planner is in mode auto."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until

pytestmark = [pytest.mark.alone, pytest.mark.suite]

CLIENTS = 12
PROMPT = "word " * 800
"""Some thousand tokens, more per second from all clients than the one prefill worker computes."""
SEEN_S = 30.0
SLOW = {"FULCRUM_WORKER_SIM_SPEEDUP": "0.5"}
"""Slows the workers, so that a few requests are a heavy load."""


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[RunningSuite]:
    workers = ("--engine", "sim", "--prefill", "1", "--decode", "2")
    with running_suite(tmp_path, *workers, env={"FULCRUM_CACHE": str(tmp_path / "cache"), **SLOW}) as found:
        yield found


async def ask_on(
    http: httpx.AsyncClient, suite: RunningSuite, client: int, answers: list[int], ended: asyncio.Event
) -> None:
    """Send requests one after another, each with its own prompt, until the test has seen its condition."""
    turn = 0
    while not ended.is_set():
        turn += 1
        body = {"model": "sim", "prompt": f"{client} {turn} {PROMPT}", "max_tokens": 4, "temperature": 0}
        answer = await http.post(f"{suite.gateway}/v1/completions", json=body)
        answers.append(answer.status_code)


async def until_decided(http: httpx.AsyncClient, suite: RunningSuite) -> dict[str, Any]:
    """Return the first decision that changes a worker, once that worker has the new assignment."""
    planner = suite.ready["planner"]
    async with asyncio.timeout(SEEN_S):
        while True:
            decisions = (await http.get(f"{planner}/v1/decisions", params={"limit": 1_000})).json()
            changes = [each for each in decisions if each["action"] in ("set_role", "set_budget")]
            workers = {each["id"]: each for each in (await http.get(f"{planner}/v1/workers")).json()}
            for decision in reversed(changes):
                worker = workers[decision["worker"]]
                if worker["epoch"] >= decision["epoch"]:
                    assert worker["moved_by"] == decision["planner_id"]
                    return dict(decision)
            await asyncio.sleep(0.1)


async def test_under_many_prompts_decode_workers_take_some_and_no_request_fails(suite: RunningSuite) -> None:
    done = suite.fulcrum("planner", "mode", "auto")
    assert done.returncode == 0, done.stderr
    answers: list[int] = []
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for client in range(CLIENTS):
                clients.create_task(ask_on(http, suite, client, answers, ended))
            try:
                decision = await until_decided(http, suite)
                after = len(answers) + 2 * CLIENTS
                await until(lambda: len(answers) >= after, timeout_s=SEEN_S, what="answers after the change")
            finally:
                ended.set()
        metrics = (await http.get(f"{suite.ready['planner']}/metrics")).text
    assert decision["mode"] == "auto"
    # Whichever the planner sees first: prompts that press, or the queue that they begin.
    assert re.search("press|a queue of prompts begins", decision["reason"]), decision["reason"]
    assert len(decision["candidates"]) >= 2
    assert decision["predicted"]["served"] > 0
    assert set(answers) == {200}
    assert 'fulcrum_planner_calls_total{outcome="done"}' in metrics


def lines(suite: RunningSuite, *arguments: str) -> list[dict[str, Any]]:
    """Return the records of a command that prints one JSON value per line."""
    done = suite.fulcrum(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_decisions_are_listed_and_explained_and_invalid_limits_are_refused_by_name(suite: RunningSuite) -> None:
    (status,) = lines(suite, "planner", "status")
    assert (status["mode"], status["lead"]) == ("advisory", "ours")
    assert suite.fulcrum("planner", "mode", "auto").returncode == 0
    (set_mode, *_) = [each for each in lines(suite, "planner", "decisions") if each["action"] == "set_mode"]
    assert set_mode["time"].endswith("Z")
    assert re.search(r"token \(\w+\) set the mode: auto", suite.fulcrum("planner", "explain", set_mode["id"]).stdout)
    assert suite.fulcrum("planner", "explain", "no-such").returncode == 1

    (found,) = lines(suite, "planner", "limits", "prefill_min=1", "quiet_hours=22:00-06:00", "--pin", "decode-1")
    assert found["kept"] and found["limits"]["revision"] == 1
    assert (found["limits"]["pinned"], found["limits"]["quiet_hours"]) == (["decode-1"], ["22:00-06:00"])
    assert "Pinned: decode-1" in suite.fulcrum("planner", "limits").stdout
    for wrong, said in (
        ("prefill_min=x", "whole number"), ("nothing=1", "not a limit"), ("quiet_hours=9", "HH:MM-HH:MM"),
        ("decode_max=0", "greater than or equal to 1"), ("prefill_min=2 prefill_max=1", "more than prefill_max"),
    ):  # fmt: skip
        refused = suite.fulcrum("planner", "limits", *wrong.split())
        assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr
    (found,) = lines(suite, "planner", "limits", "--unpin", "decode-1", "quiet_hours=none")
    assert (found["limits"]["pinned"], found["limits"]["quiet_hours"]) == ([], [])
    (found,) = lines(suite, "planner", "limits", "--model", "sim", "decode_max=2")
    assert found["limits"]["models"]["sim"]["decode_max"] == 2
