"""Test that the memory a gateway holds for large bodies is bounded and freed early."""

import asyncio
import gc
import json
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

from libs.testing.suites.processes import gateway_metrics
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, scripted_worker
from services.gateway.request.parse import ParsedRequest

BODY_BYTES = 1024 * 1024
OPEN = 2
PROMPT = "large for nothing"
JSON = {"content-type": "application/json"}


def body(tokens: int, size_bytes: int = BODY_BYTES) -> bytes:
    """Build a large body of little content, so that its prompt fits the model."""
    request_body = json.dumps({"model": "sim", "prompt": PROMPT, "max_tokens": tokens, "stream": True}).encode()
    return request_body + b" " * (size_bytes - len(request_body))


async def test_bodies_over_the_bound_are_refused_until_earlier_answers_have_ended(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        plans = tuple(Plan(tokens=2, hang=True) for _ in range(OPEN))
        worker = await stack.enter_async_context(scripted_worker("m0", "mixed", plans=plans))
        bounds = {"max_body_bytes": BODY_BYTES, "max_open_body_bytes": OPEN * BODY_BYTES + 1000}
        gateway = await stack.enter_async_context(open_gateway_over(worker.worker, **bounds))

        async def ask(content: bytes) -> tuple[int, str | None]:
            async with gateway.http.stream("POST", "/v1/completions", content=content, headers=JSON) as answer:
                await answer.aread()
                return answer.status_code, answer.headers.get("retry-after")

        tracemalloc.start()
        before_bytes, _ = tracemalloc.get_traced_memory()
        asking = [asyncio.ensure_future(ask(body(8))) for _ in range(OPEN)]
        await until(lambda: len(worker.submits) == OPEN, what="open streams")
        held_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        tracemalloc.stop()
        # The client in this process holds its copies; the gateway holds none.
        assert held_bytes < (OPEN + 1) * BODY_BYTES
        assert not [each for each in gc.get_objects() if isinstance(each, ParsedRequest) and each.prompts == (PROMPT,)]
        assert gateway.running.stalls.body_bytes == OPEN * BODY_BYTES
        assert (await gateway_metrics(gateway.http, gateway.url))["body_bytes"] == OPEN * BODY_BYTES

        status, retry_after = await ask(body(8))
        assert status == 429
        assert retry_after is not None and int(retry_after) >= 1
        assert (await ask(body(8, 500)))[0] == 200  # a small one fits
        for each in asking:
            each.cancel()
        await until(gateway.idle, what="an idle gateway")
        assert gateway.running.stalls.body_bytes == 0
        assert (await ask(body(8)))[0] == 200
