"""A whole suite of vLLM workers: what it answers, and what is left when one is killed."""

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest

from libs.testing.processes import pid_of
from libs.testing.streams import Streamed, stream
from libs.testing.suite import Suite, running_suite
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
REQUESTS = 6
GONE_S = 1.0
START_S = 400.0


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    folder = tmp_path_factory.mktemp("suite")
    arguments = ("--engine", "vllm", "--prefill", "1", "--decode", "2")
    settings = {"FULCRUM_WORKER_VLLM_ARGUMENTS": '{"max_model_len": 512}', "FULCRUM_WORKER_KV_MEMORY_MB": "128"}
    with running_suite(folder, *arguments, env=settings, start_s=START_S) as found:
        yield found


def test_it_says_paris(suite: Suite) -> None:
    said = suite.fulcrum("chat", "What is the capital of France?")
    assert said.returncode == 0 and "Paris" in said.stdout, said.stdout + said.stderr


async def test_streams_go_on_when_a_worker_is_killed_and_nothing_of_it_is_left(suite: Suite) -> None:
    async with httpx.AsyncClient(timeout=300) as http:

        async def ask(into: Streamed, number: int) -> None:
            body = {"model": MODEL, "prompt": f"Count from {number}: {number}," * 3, "max_tokens": 60, "temperature": 0}
            await stream(http, suite.gateway, into=into, tenant="tests", ignore_eos=True, **body)

        expected, found = ([Streamed(0.0) for _ in range(REQUESTS)] for _ in range(2))
        await asyncio.gather(*(ask(each, number) for number, each in enumerate(expected)))
        asking = asyncio.gather(*(ask(each, number) for number, each in enumerate(found)))
        await until(lambda: all(each.text for each in found), timeout_s=120, what="streams")
        pid = pid_of(suite, "decode-1")
        assert pid is not None
        children = [each for each in psutil.Process(pid).children(recursive=True) if each.name().startswith("VLLM")]
        assert any("EngineCor" in child.name() for child in children)
        psutil.Process(pid).kill()
        _gone, alive = await asyncio.to_thread(psutil.wait_procs, children, GONE_S)
        assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)
        await asking
    for answer, unbroken in zip(found, expected, strict=True):
        assert (answer.text, answer.finish_reason, answer.error) == (unbroken.text, "length", None)
