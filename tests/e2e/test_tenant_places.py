"""Tests that tenants share the places to decode of a live suite and that preempted answers lose no token."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

WAIT_S = 60.0
PLACES = 4
LONG: dict[str, Any] = {"model": "sim", "prompt": "a b c", "max_tokens": 600, "ignore_eos": True, "seed": 7}
SHORT: dict[str, Any] = {"model": "sim", "prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("places")
    env = {"FULCRUM_CACHE": str(folder / "cache"), "FULCRUM_WORKER_MAX_SEQUENCES": str(PLACES)}
    with running_suite(folder, "--engine", "sim", env=env) as found:
        yield found


def key_of(suite: RunningSuite, tenant: str) -> dict[str, str]:
    made = json.loads(suite.fulcrum("keys", "create", "--tenant", tenant, "--json").stdout)
    return {"authorization": f"Bearer {made['key']}"}


async def keys_count(http: httpx.AsyncClient, suite: RunningSuite) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await http.post(f"{suite.gateway}/v1/completions", json=SHORT)).status_code != 401:
            await asyncio.sleep(0.05)


class Streams:
    """Request long answers for one tenant, all at once."""

    def __init__(self, http: httpx.AsyncClient, suite: RunningSuite, headers: dict[str, str], count: int) -> None:
        self._url, self._http, self._headers = f"{suite.gateway}/v1/completions", http, headers
        self.texts = [""] * count
        self.started = 0
        self.ended = 0
        self._began = asyncio.Event()

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        body = {**LONG, "stream": True}
        async with self._http.stream("POST", self._url, json=body, headers=self._headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[len("data: ") :])

    async def one(self, number: int) -> None:
        async for event in self._events():
            assert "error" not in event, event
            if not self.texts[number]:
                self.started += 1
                if self.started == PLACES:
                    self._began.set()
            self.texts[number] += event["choices"][0]["text"]
        self.ended += 1

    async def fill(self) -> None:
        """Wait until every place has one of them."""
        async with asyncio.timeout(WAIT_S):
            await self._began.wait()


async def test_a_tenant_that_holds_every_place_gives_some_up_and_its_answers_stay_whole(suite: RunningSuite) -> None:
    flood, modest = key_of(suite, "flood"), key_of(suite, "modest")
    async with httpx.AsyncClient(timeout=WAIT_S, limits=httpx.Limits(max_connections=100)) as http:
        await keys_count(http, suite)
        alone = (await http.post(f"{suite.gateway}/v1/completions", json=LONG, headers=flood)).json()
        streams = Streams(http, suite, flood, 3 * PLACES)
        async with asyncio.TaskGroup() as group:
            for number in range(3 * PLACES):
                group.create_task(streams.one(number))
            await streams.fill()
            answer = await http.post(f"{suite.gateway}/v1/completions", json=SHORT, headers=modest)
            assert answer.status_code == 200
            assert streams.ended == 0, "it waited until a long answer had ended"
        assert streams.texts == [alone["choices"][0]["text"]] * (3 * PLACES)


async def test_a_prompt_of_one_tenant_is_not_cached_for_another(suite: RunningSuite) -> None:
    keys = {tenant: key_of(suite, tenant) for tenant in ("ann", "bob")}
    body = {"model": "sim", "prompt": "one two three four " * 40, "max_tokens": 1}

    async def cached_tokens(tenant: str) -> int:
        async with asyncio.timeout(WAIT_S):
            while (answer := await http.post(url, json=body, headers=keys[tenant])).status_code == 401:
                await asyncio.sleep(0.05)  # its key is not known yet
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    url = f"{suite.gateway}/v1/completions"
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        assert await cached_tokens("ann") == 0
        assert await cached_tokens("ann") > 0
        assert await cached_tokens("bob") == 0
