"""Test of an answer that the gateway fails to make: it ends with an error and affects no other."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.model.tokenizer import Decoder
from libs.testing.wait import until
from libs.testing.workers.scripted import expected_text, scripted_worker

WHOLE_TOKENS = 4
TOKENS = 12
BAD_TOKEN = ord(expected_text(TOKENS)[8])
FIELDS = {"whole": {}, "with stop strings": {"stop": ["never"]}, "stream": {"stream": True}}
FIELDS |= {"stream with stop strings": {"stream": True, "stop": ["never"]}}


@pytest.fixture(autouse=True)
def _bad_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that fails at one token."""
    push = Decoder.push

    def fails(decoder: Decoder, token_id: int) -> str:
        if token_id == BAD_TOKEN:
            raise RuntimeError("no text for this token")
        return push(decoder, token_id)

    monkeypatch.setattr(Decoder, "push", fails)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
async def test_a_token_that_cannot_be_decoded_ends_only_its_own_answer(
    open_gateway_over: Any, fields: dict[str, Any]
) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(scripted_worker("m0", "mixed"))
        gateway = await stack.enter_async_context(open_gateway_over(worker.worker))
        await gateway.complete(WHOLE_TOKENS)  # a prompt known to kill no worker may run on it four times
        worker.voice.clear()  # so that all of them run at once
        others = [asyncio.ensure_future(gateway.complete(WHOLE_TOKENS)) for _ in range(3)]
        broken = asyncio.ensure_future(gateway.complete(TOKENS, **fields))
        await until(lambda: len(worker.submits) == 5, what="four sequences at one worker")
        worker.voice.set()

        answer = await broken
        if fields.get("stream") and answer.status_code == 200:
            *_, last = [line for line in answer.text.splitlines() if line]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("answer_failed", "server_error")
        for each in await asyncio.gather(*others):
            assert each.json()["choices"][0]["text"] == expected_text(WHOLE_TOKENS)

        assert (await gateway.complete(WHOLE_TOKENS)).status_code == 200
        assert worker.streams == 1  # the link was open all the time
        assert gateway.tasks.error is None
        await until(gateway.idle, what="an idle gateway")
        counted = 'failed_answers_total{code="answer_failed",route="/v1/completions"} 1.0'
        assert counted in (await gateway.http.get("/metrics")).text
