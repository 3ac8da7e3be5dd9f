"""Tests of prompts that kill the processes that compute them, in a whole suite on the sim engine."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.batch.jobs import answered, submit, unanswered, until_answered
from libs.testing.suites.processes import gateway_metrics, leftovers, pid_of, until_whole
from libs.testing.suites.steady_load import Streamed, stream
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.workers.mortal import FATAL_TOKENS, PROMPT_MARK, TOKENS_MARK, mortal_env

pytestmark = [pytest.mark.alone, pytest.mark.suite]

WORKERS = ("prefill-1", "prefill-2", "prefill-3", "decode-1", "decode-2", "decode-3")
DEATHS = (2, 3)
"""Workers that one prompt kills: three if neighbours moved with it from the first to the second, so that those two
losses do not identify it."""
INNOCENT = {"model": "sim", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def mortal_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("mortal")
    shape = ("--engine", "sim", "--prefill", "3", "--decode", "3")
    env = {"FULCRUM_CACHE": str(folder / "cache"), "FULCRUM_WORKER_SIM_SPEEDUP": "0.5"}
    with running_suite(folder, *shape, env=mortal_env(folder) | env) as suite:
        yield suite


class Deaths:
    """The workers that have died since."""

    def __init__(self, suite: RunningSuite) -> None:
        self._suite = suite
        self._pids = {name: pid_of(suite, name) for name in WORKERS}

    def count(self) -> int:
        """Count the dead workers, including those restarted by now."""
        return sum(pid_of(self._suite, name) != pid for name, pid in self._pids.items())


async def innocents(http: httpx.AsyncClient, suite: RunningSuite, stop: asyncio.Event) -> list[Streamed]:
    """Run clients that repeat requests until they are stopped."""
    found: list[Streamed] = []

    async def ask(number: int) -> None:
        while not stop.is_set():
            answer = Streamed(0.0)
            found.append(answer)
            prompt = f"innocent {number} {len(found)} " * 20
            await stream(http, suite.gateway, into=answer, tenant="innocent", prompt=prompt, **INNOCENT)

    await asyncio.gather(*map(ask, range(8)))
    return found


async def complete(http: httpx.AsyncClient, suite: RunningSuite, prompt: str, **fields: Any) -> httpx.Response:
    return await http.post(
        f"{suite.gateway}/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 30} | fields
    )


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 422 and answer.json()["error"]["code"] == "poison_request"


@pytest.mark.parametrize("mark", [PROMPT_MARK, TOKENS_MARK], ids=["in its prompt", "in mid-stream"])
async def test_two_processes_die_and_all_other_requests_are_answered(mortal_suite: RunningSuite, mark: str) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, mortal_suite)
        before, stop = Deaths(mortal_suite), asyncio.Event()
        others = asyncio.ensure_future(innocents(http, mortal_suite, stop))
        answer = await complete(http, mortal_suite, f"{mark}, at once")
        assert is_refused(answer), answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert before.count() in DEATHS
        again = await asyncio.gather(*(complete(http, mortal_suite, f"{mark}, at once") for _ in range(4)))
        assert all(map(is_refused, again))
        await until_whole(http, mortal_suite)  # all three of a role may have been lost at once
        assert (await complete(http, mortal_suite, "hello")).status_code == 200
        stop.set()
        for each in await others:
            assert (each.error, each.finish_reason, each.done) == (None, "length", True)
        assert before.count() in DEATHS, "the second request killed no worker"
        assert not await leftovers(http, mortal_suite)


async def test_a_stream_ends_with_the_error_after_the_tokens_it_has_sent(mortal_suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, mortal_suite)
        before, answer = Deaths(mortal_suite), Streamed(0.0)
        body = {"model": "sim", "prompt": f"{TOKENS_MARK}, streamed", "max_tokens": 30, "ignore_eos": True}
        await stream(http, mortal_suite.gateway, into=answer, tenant="", **body)
        assert answer.error is not None and answer.error["code"] == "poison_request"
        assert not answer.done
        assert before.count() in DEATHS
        # Each token is a character; a worker that prefills it again samples one more.
        assert 0 < len(answer.text) <= FATAL_TOKENS + max(DEATHS)


async def test_a_batch_line_kills_two_processes_and_its_error_says_so(
    mortal_suite: RunningSuite, tmp_path: Path
) -> None:
    file, bad = tmp_path / "lines.jsonl", 5
    with file.open("w") as out:
        for number in range(20):
            prompt = f"{PROMPT_MARK}, in a batch" if number == bad else f"line {number}"
            body = {"model": "sim", "prompt": prompt, "max_tokens": 3}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, mortal_suite)
        before = Deaths(mortal_suite)
        batch_id = await submit(http, mortal_suite.gateway, file)
        batch = await until_answered(http, [mortal_suite.gateway], batch_id)
        assert batch["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
        errors = (await http.get(f"{mortal_suite.gateway}/v1/files/{batch['error_file_id']}/content")).text
        error = json.loads(errors.splitlines()[0])
        assert (error["custom_id"], error["error"]["code"]) == (f"line-{bad}", "poison_request")
        assert before.count() in DEATHS
        assert not list(unanswered(await answered(http, mortal_suite.gateway, batch), 20))
        assert (await gateway_metrics(http, mortal_suite.gateway))["poison_prompts"] >= 1
        await until_whole(http, mortal_suite)
