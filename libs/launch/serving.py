"""Whether a started suite serves: every gateway says so, and every worker is registered."""

import asyncio
from collections.abc import Sequence

import httpx

from libs.contracts.errors import StartupError
from libs.launch.ready import Ready

TIMEOUT_S = 30.0
POLL_S = 0.05
REQUEST_TIMEOUT_S = 2.0


async def until_serving(ready: Ready, workers: Sequence[str]) -> None:
    """Returns once requests will be answered and `workers` are listed; raises StartupError after TIMEOUT_S."""
    missing = "an answer"
    try:
        async with asyncio.timeout(TIMEOUT_S), httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            while missing := await _missing(client, ready, workers):  # noqa: ASYNC110 (other processes set no event)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise StartupError(f"the processes run, but after {TIMEOUT_S:g} s there is still no {missing}") from None


async def _missing(client: httpx.AsyncClient, ready: Ready, workers: Sequence[str]) -> str:
    """The first thing that is not there yet, in words."""
    try:
        for gateway in ready.gateways:
            if (await client.get(f"{gateway}/readyz")).status_code != httpx.codes.OK:
                return f"ready gateway at {gateway}"
        answer = await client.get(f"{ready.planner}/v1/workers")
        there = {str(worker["id"]) for worker in answer.json()} if answer.is_success else set()
    except httpx.TransportError as error:
        return f"answer from {error.request.url}"
    unseen = sorted(set(workers) - there)
    return f"registration of {', '.join(unseen)}" if unseen else ""
