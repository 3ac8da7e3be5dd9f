"""Tests of workers killed in mid-stream in a whole suite on the sim engine: no answer changes."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from libs.testing.suites.processes import gateway_metrics, kill, until_whole
from libs.testing.suites.steady_load import Streamed, joined_logprobs, stream
from libs.testing.suites.suite import RunningSuite
from libs.testing.wait import until

pytestmark = [pytest.mark.alone, pytest.mark.suite]

REQUESTS = 12
WHOLE = {"logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "stop": ["qz", "e"], "max_tokens": 40}
PLAIN = {"max_tokens": 40}


async def ask_all(http: httpx.AsyncClient, urls: Sequence[str], into: Sequence[Streamed]) -> None:
    """Send the same requests at each call, none with a cached prefix: greedy and sampled, plain and not."""
    tenant = uuid.uuid4().hex

    async def ask(number: int) -> None:
        more: dict[str, Any] = WHOLE if number % 4 < 2 else PLAIN
        body = {**more, "model": "sim", "prompt": f"{number} " * 100, "ignore_eos": True}
        sampled = {"temperature": 0.8 * (number % 2), "seed": number}
        await stream(http, urls[number % len(urls)], into=into[number], tenant=tenant, **body, **sampled)

    await asyncio.gather(*map(ask, range(REQUESTS)))


def answers() -> list[Streamed]:
    return [Streamed(0.0) for _ in range(REQUESTS)]


@pytest.mark.parametrize("name", ["prefill-1", "decode-2"])
async def test_text_logprobs_stops_and_usage_equal_those_of_an_unbroken_stream(suite: RunningSuite, name: str) -> None:
    urls = suite.ready["gateways"]
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        expected, found = answers(), answers()
        await ask_all(http, urls, expected)
        before = sum([(await gateway_metrics(http, url)).get("reroutes_total", 0.0) for url in urls])
        asking = asyncio.ensure_future(ask_all(http, urls, found))
        begun = 1 if name.startswith("prefill") else REQUESTS // 2  # some prompts are computed while others stream
        await until(lambda: sum(bool(each.text) for each in found) >= begun, timeout_s=30, what="streams")
        await kill(suite, name)
        await asking
        for answer, unbroken in zip(found, expected, strict=True):
            assert (answer.text, answer.finish_reason) == (unbroken.text, unbroken.finish_reason)
            assert (answer.usage, answer.done, answer.error) == (unbroken.usage, True, None)
            assert joined_logprobs(answer) == joined_logprobs(unbroken)
        assert {each.finish_reason for each in found} == {"stop", "length"}
        after = [await gateway_metrics(http, url) for url in urls]
        assert sum(each.get("reroutes_total", 0.0) for each in after) > before
        assert [each["live"] + each["waiting"] for each in after] == [0, 0]


async def test_vectors_lost_with_a_killed_prefill_worker_come_from_another(suite: RunningSuite) -> None:
    urls = suite.ready["gateways"]
    body = {"model": "sim", "input": [f"{uuid.uuid4().hex} {number} " * 12 for number in range(REQUESTS)]}
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        expected = (await http.post(f"{urls[0]}/v1/embeddings", json=body)).json()["data"]
        before = sum([(await gateway_metrics(http, url)).get("reroutes_total", 0.0) for url in urls])
        asking = [asyncio.ensure_future(http.post(f"{url}/v1/embeddings", json=body)) for url in urls]
        await until_bound(http, urls)
        await kill(suite, "prefill-1")
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200, answer.text
            assert answer.json()["data"] == expected
        after = [await gateway_metrics(http, url) for url in urls]
        assert sum(each.get("reroutes_total", 0.0) for each in after) > before
        assert [each["live"] + each["waiting"] for each in after] == [0, 0]


async def until_bound(http: httpx.AsyncClient, urls: Sequence[str]) -> None:
    """Return once each gateway has prompts at workers."""
    async with asyncio.timeout(30):
        while not all([(await gateway_metrics(http, url))["legs"] for url in urls]):
            await asyncio.sleep(0.01)
