"""Tests of workers of a real model: killed in mid-stream they change no answer, and hard work is not silence."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from libs.testing.suites.processes import gateway_metrics, integrity, kill, until_whole, workers
from libs.testing.suites.steady_load import Streamed, joined_logprobs, stream
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.torch, pytest.mark.faults, pytest.mark.timeout(240)]

MODEL = "SmolLM2-135M-Instruct"
WHOLE = {"logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "stop": [" the", "\n"]}
REQUESTS = 6
TOKENS = 32
LONG_TIMES = 60
LONG_TOKENS = 1500
STREAMS = 8


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """Two workers of each role: only a worker with a spare can be given up for its silence."""
    shape = ("--engine", "torch", "--prefill", "2", "--decode", "2")
    threads = {"FULCRUM_WORKER_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with running_suite(tmp_path_factory.mktemp("suite"), *shape, env=threads) as found:
        yield found


def answers() -> list[Streamed]:
    return [Streamed(0.0) for _ in range(REQUESTS)]


async def ask_all(
    http: httpx.AsyncClient, suite: RunningSuite, temperature: float, into: Sequence[Streamed], *, times: int = 1
) -> None:
    """Send the same requests at each call, none of which finds its prefix cached; `times` as long."""
    tenant = uuid.uuid4().hex

    async def ask(number: int) -> None:
        more: dict[str, Any] = WHOLE if number % 2 else {}
        body = {**more, "model": MODEL, "max_tokens": TOKENS, "ignore_eos": True}
        prompt = f"Once upon a time, {number} friends went to" * times
        sampled = {"temperature": temperature, "seed": number}
        await stream(http, suite.gateway, into=into[number], tenant=tenant, prompt=prompt, **body, **sampled)

    await asyncio.gather(*map(ask, range(REQUESTS)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_decode_worker_killed_in_mid_stream_changes_no_answer(suite: RunningSuite, temperature: float) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        await until_whole(http, suite)
        expected, found = answers(), answers()
        await ask_all(http, suite, temperature, expected)
        before = (await gateway_metrics(http, suite.gateway)).get("reroutes_total", 0.0)
        asking = asyncio.ensure_future(ask_all(http, suite, temperature, found))
        await until(lambda: sum(len(each.came_s) > 3 for each in found) > REQUESTS // 2, timeout_s=60, what="streams")
        await kill(suite, (await busiest(http, suite, "decode"))[0])
        await asking
        assert (await gateway_metrics(http, suite.gateway)).get("reroutes_total", 0.0) > before
    same_answers(found, expected)


async def test_a_prefill_worker_killed_over_its_prompts_changes_no_answer(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        await until_whole(http, suite)
        expected, found = answers(), answers()
        await ask_all(http, suite, 0.8, expected, times=LONG_TIMES)
        asking = asyncio.ensure_future(ask_all(http, suite, 0.8, found, times=LONG_TIMES))
        await until(lambda: any(each.came_s for each in found), timeout_s=60, what="a first token")
        name, sequences = await busiest(http, suite, "prefill")
        assert sequences, "all prompts were computed before the kill"
        await kill(suite, name)
        await asking
    same_answers(found, expected)


async def busiest(http: httpx.AsyncClient, suite: RunningSuite, role: str) -> tuple[str, int]:
    """Return the worker of that role with most sequences, and their number."""
    held = {
        str(worker["id"]): (await integrity(suite, worker["address"])).live_sequences
        for worker in await workers(http, suite)
        if worker["role"] == role
    }
    return max(held.items(), key=lambda item: item[1])


def same_answers(found: Sequence[Streamed], expected: Sequence[Streamed]) -> None:
    """Check that answers are equal in every part, and complete."""
    for answer, unbroken in zip(found, expected, strict=True):
        assert unbroken.finish_reason in ("length", "stop")
        assert (answer.text, answer.finish_reason) == (unbroken.text, unbroken.finish_reason)
        assert (answer.usage, answer.done, answer.error) == (unbroken.usage, True, None)
        same_logprobs(joined_logprobs(answer), joined_logprobs(unbroken))


def same_logprobs(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    """Check equality up to the order of sums: tokens decoded one per step are computed again as one prompt."""
    assert found.get("tokens") == expected.get("tokens")
    assert found.get("text_offset") == expected.get("text_offset")
    assert found.get("token_logprobs", []) == pytest.approx(expected.get("token_logprobs", []), abs=1e-3)
    for tops, others in zip(found.get("top_logprobs", []), expected.get("top_logprobs", []), strict=True):
        assert tops == pytest.approx(others, abs=1e-3)


async def test_workers_busy_with_long_prompts_and_many_streams_do_not_count_as_silent(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        await until_whole(http, suite)
        before = await gateway_metrics(http, suite.gateway)
        fields = {"model": MODEL, "ignore_eos": True, "seed": 1}
        streams = [
            stream(http, suite.gateway, prompt=f"{number} little ducks", max_tokens=60, **fields)
            for number in range(STREAMS)
        ]
        prompts = [
            stream(http, suite.gateway, prompt=[number + 300] * LONG_TOKENS, max_tokens=2, **fields)
            for number in range(2)
        ]
        found = await asyncio.gather(*streams, *prompts)
        assert all(each.done for each in found)
        now = await gateway_metrics(http, suite.gateway)
        assert now["silences_total"] == before["silences_total"]
        assert now.get("reroutes_total", 0.0) == before.get("reroutes_total", 0.0)
