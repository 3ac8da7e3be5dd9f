"""Tests that a response reported as stored is found by the next request."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from libs.contracts.errors import ResponseNotFound
from libs.dispatch.generation import ApiFinishReason
from libs.stores.responses import MemoryResponses, ResponsesDown
from services.gateway.request.choice import Piece
from services.gateway.responses.exchange import ResponseExchange, ResponseOutput
from services.gateway.responses.request import StoredResponses, build_response_request, parse_response

KEEP_S = 60


class Refusing(MemoryResponses):
    """A store that takes nothing now: full, read-only, or away."""

    async def keep(self, *_: Any) -> bool:
        raise ResponsesDown("OOM command not allowed")


class Wire:
    """The events that a client would receive."""

    def __init__(self) -> None:
        self.body = b""
        self.shown: Any = None

    async def start(self, *_: Any) -> None:
        pass

    async def part(self, body: bytes, **_: Any) -> None:
        self.body += body

    async def json(self, _status: int, shown: Any, _headers: Any) -> None:
        self.shown = msgspec.to_builtins(shown)


def ended_choice() -> Any:
    text = SimpleNamespace(
        done=True, error=None, record=None, reasoning_tokens=0, take=lambda: Piece(finish=ApiFinishReason.STOP)
    )
    generation = SimpleNamespace(
        prompt_tokens=3, cached_tokens=0, output=[1], reused_tokens=0, rejected_tokens=0, accepted_tokens=0
    )
    return SimpleNamespace(text=text, generation=generation, index=0, tools_as_text=False)


async def answered(
    store: Any, monkeypatch: pytest.MonkeyPatch, *, streamed: bool, asks: bool = True
) -> tuple[Any, Any]:
    """The response as its client got it last, and its `store` in each event before."""
    kept = StoredResponses(store, KEEP_S)
    body = {"model": "m", "input": "hi", "store": asks}
    found = build_response_request(parse_response(json.dumps(body).encode()), [], "resp_1", 1)

    async def keep(response: Any) -> bool:
        return await kept.keep("a", found.items or [], response)

    monkeypatch.setattr(ResponseExchange, "_fill", lambda self: None)
    exchange = ResponseExchange(
        ended_choice(), found.shown, ResponseOutput(lambda prefix: prefix + "1", None), SimpleNamespace(wait=_now),  # type: ignore[arg-type]
        keep=keep if found.store else None, headers={},
    )  # fmt: skip
    wire = Wire()
    if not streamed:
        await exchange.whole(wire)  # type: ignore[arg-type]
        return wire.shown, []
    await exchange.stream(wire)  # type: ignore[arg-type]
    events = [json.loads(line[6:]) for line in wire.body.decode().splitlines() if line.startswith("data: ")]
    responses = [each["response"] for each in events if "response" in each]
    return responses[-1], [each["store"] for each in responses[:-1]]


async def _now() -> None:
    pass


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("make", [lambda: MemoryResponses(time.time), lambda: Refusing(time.time)], ids=["kept", "not"])
async def test_store_is_true_if_the_response_can_be_retrieved(
    make: Callable[[], Any], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    shown, before = await answered(store, monkeypatch, streamed=streamed)
    assert shown["status"] == "completed"
    assert True not in before, "a promise that the end may take back"
    try:
        again = await StoredResponses(store, KEEP_S).response("a", "resp_1")
    except ResponseNotFound:
        assert shown["store"] is False
    else:
        assert shown["store"] is True and again["store"] is True


async def test_a_client_that_refuses_storage_gets_store_false(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryResponses(time.time)
    shown, _ = await answered(store, monkeypatch, streamed=False, asks=False)
    assert shown["store"] is False
    with pytest.raises(ResponseNotFound):
        await StoredResponses(store, KEEP_S).response("a", "resp_1")


@pytest.mark.parametrize("value", [b"", b"nonsense", b"[]", b"""{"items": 1, "response": {}}"""])
async def test_a_foreign_value_in_the_store_counts_as_missing(value: bytes) -> None:
    kept = StoredResponses(MemoryResponses(time.time), KEEP_S)
    await kept.store.keep("a", "resp_1", value, KEEP_S)
    with pytest.raises(ResponseNotFound):
        await kept.response("a", "resp_1")
    with pytest.raises(ResponseNotFound):
        await kept.items("a", "resp_1")
