"""Workers killed under load, in a whole suite on the sim engine: every answer is what it would have been."""

import asyncio
import os
import signal
import uuid
from typing import Any

import httpx
import pytest

from libs.testing.processes import kill
from libs.testing.streams import Streamed, stream
from libs.testing.suite import Suite

pytestmark = pytest.mark.suite

REQUESTS = 24
TOKENS = 120


async def _ask(http: httpx.AsyncClient, url: str, number: int) -> tuple[str, int]:
    body = {"model": "sim", "prompt": f"Request {number}", "max_tokens": TOKENS, "temperature": 0.8, "seed": number}
    answer = await http.post(f"{url}/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]["completion_tokens"]


async def _ask_all(http: httpx.AsyncClient, urls: list[str]) -> list[tuple[str, int]]:
    return await asyncio.gather(*(_ask(http, urls[number % len(urls)], number) for number in range(REQUESTS)))


async def _metric(http: httpx.AsyncClient, urls: list[str], name: str) -> float:
    """Summed over gateways and labels."""
    texts = [(await http.get(f"{url}/metrics")).text for url in urls]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(f"fulcrum_gateway_{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def _workers(http: httpx.AsyncClient, suite: Suite) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_changes_no_answer(suite: Suite, role: str) -> None:
    urls = suite.ready["gateways"]
    async with httpx.AsyncClient(timeout=60) as http:
        expected = await _ask_all(http, urls)
        asking = asyncio.ensure_future(_ask_all(http, urls))
        pid = next(worker["pid"] for worker in await _workers(http, suite) if worker["role"] == role)
        await asyncio.wait([asking], timeout=0.2)  # somewhere in the middle: any moment must do
        os.kill(pid, signal.SIGKILL)
        answers = await asking
        assert [tokens for _, tokens in answers] == [TOKENS] * REQUESTS
        assert answers == expected

        assert await _metric(http, urls, "live") == 0
        assert await _metric(http, urls, "waiting") == 0
        assert role == "prefill" or await _metric(http, urls, "reroutes_total") > 0
        async with asyncio.timeout(20):
            while len(await _workers(http, suite)) < 4:
                await asyncio.sleep(0.1)


WHOLE = {"logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "stop": ["qz"], "max_tokens": 300}


async def _ask_whole(http: httpx.AsyncClient, url: str, number: int, temperature: float) -> Streamed:
    """No prefix is cached, so that usage is the same each time."""
    tenant = uuid.uuid4().hex
    body = {**WHOLE, "model": "sim", "prompt": f"{number}", "temperature": temperature, "seed": number}
    return await stream(http, url, tenant=tenant, **body, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_text_logprobs_stops_and_usage_are_those_of_an_unbroken_stream(suite: Suite, temperature: float) -> None:
    url = suite.ready["gateways"][0]
    async with httpx.AsyncClient(timeout=60) as http:
        async with asyncio.timeout(20):
            while await _metric(http, [url], "workers") < 4:
                await asyncio.sleep(0.1)
        expected = await asyncio.gather(*(_ask_whole(http, url, number, temperature) for number in range(12)))
        before = await _metric(http, [url], "reroutes_total")
        asking = asyncio.gather(*(_ask_whole(http, url, number, temperature) for number in range(12)))
        await asyncio.wait([asking], timeout=0.4)
        await kill(suite, "decode-1")
        answers = await asking
        for answer, unbroken in zip(answers, expected, strict=True):
            assert (answer.text, answer.finish_reason) == (unbroken.text, unbroken.finish_reason)
            assert (answer.usage, answer.done) == (unbroken.usage, True)
            assert _joined(answer) == _joined(unbroken)
        assert await _metric(http, [url], "reroutes_total") > before


def _joined(answer: Streamed) -> dict[str, list[Any]]:
    """Logprobs without regard to how they were cut into chunks."""
    found: dict[str, list[Any]] = {}
    for part in answer.logprobs:
        for name, values in part.items():
            found.setdefault(name, []).extend(values)
    return found
