"""Tests of what one line, one client or one topic may cost a batch gateway."""

import asyncio
import json
import tracemalloc
from contextlib import closing
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from libs.contracts.errors import InvalidRequest, UnknownModel
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result, Share
from libs.policy.batch import GatewayLoad
from libs.policy.gateway.view import WorkerView
from libs.testing.wait import ManualClock, until
from load.chaos.loop import SimLoop
from services.gateway.batch import line_request
from services.gateway.batch.line_request import (
    AWAY_S,
    FORGET_S,
    MAX_IMAGE_BYTES,
    LineRequester,
    ServedModels,
    Slots,
)
from services.gateway.batch.lines import MAX_RESULT_BYTES, BatchLine, IdHashes, fitting, read_line, refused
from services.gateway.batch.upload import MAX_SILENT_S, MAX_UPLOAD_S, MIN_BYTES_PER_S, chunks

SMALL_BYTES = 20_000


def read(**change: object) -> BatchLine:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}, **change}
    return read_line(json.dumps(line).encode(), number=7, place=6, endpoint="/v1/completions", repeated=False)


@pytest.mark.parametrize(
    "change",
    [
        {"custom_id": "x" * 600_000},
        {"custom_id": "x" * 600_000, "body": None, "method": 3},
        {"url": "x" * 1_100_000},
        {"method": "x" * 1_100_000},
    ],
)
def test_a_refused_line_costs_only_its_reason(change: dict[str, object]) -> None:
    line = read(**change)
    assert line.refusal is not None
    result = refused("batch_1", line, line.refusal)
    assert result.ByteSize() < SMALL_BYTES
    assert json.loads(result.answer)["error"]["line"] == 7


def test_every_echo_of_input_in_an_error_is_truncated() -> None:
    name = "m" * 1_100_000
    result = refused("batch_1", read(), UnknownModel(f"model {name} is not served", param=name))
    assert result.ByteSize() < SMALL_BYTES
    assert json.loads(result.answer)["response"]["body"]["error"]["code"] == "model_not_found"


def test_a_result_too_large_for_a_record_becomes_an_error_of_its_line() -> None:
    whole = Result(job_id="batch_1", custom_id="a", ok=True, answer=b"{}")
    assert fitting(whole, read()) is whole
    found = fitting(Result(job_id="batch_1", custom_id="a", ok=True, answer=b"x" * MAX_RESULT_BYTES), read())
    assert (found.ok, found.custom_id) == (False, "a")
    assert json.loads(found.answer)["error"]["code"] == "answer_too_large"
    assert found.ByteSize() < SMALL_BYTES


def test_repeated_custom_ids_are_found_in_bounded_memory_whatever_their_length() -> None:
    lines = [b'{"custom_id": "%d%s"}' % (number % 100, b"x" * 50_000) for number in range(200)]
    hashes = IdHashes()
    for line in lines:
        hashes.add(line)
    finder = hashes.finder()
    tracemalloc.start()
    for line in lines:
        finder.add(line)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(finder.places) == list(range(100, 200))
    assert held_bytes < 100_000


def test_a_slow_upload_is_ended_and_a_steady_one_is_not() -> None:
    async def body(part: bytes, count: int, every_s: float = 1.0) -> int:
        parts = iter([part] * count)

        async def receive() -> Message:
            await asyncio.sleep(every_s)
            found = next(parts, b"")
            return {"type": "http.request", "body": found, "more_body": bool(found)}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        return sum([len(part) async for part in chunks(request)])

    flowing, seconds = b"x" * MIN_BYTES_PER_S, round(MAX_SILENT_S)
    with closing(SimLoop(Random(0))) as loop:
        assert loop.run_until_complete(body(flowing, 5 * seconds)) == 5 * seconds * MIN_BYTES_PER_S
        assert loop.run_until_complete(body(b"x", seconds - 2)) == seconds - 2
        began_s = loop.time()
        with pytest.raises(InvalidRequest, match="bytes a second"):
            loop.run_until_complete(body(b"xx", 1000))
        assert loop.time() - began_s <= MAX_SILENT_S + 1, "two bytes a second hold a place this long"
        with pytest.raises(InvalidRequest, match="bytes a second"):
            loop.run_until_complete(body(flowing * 100, 3, every_s=MAX_SILENT_S + 1))
        began_s = loop.time()
        with pytest.raises(InvalidRequest, match="take over 3600 s"):
            loop.run_until_complete(body(flowing, round(2 * MAX_UPLOAD_S)))
        assert loop.time() - began_s <= MAX_UPLOAD_S + 1


async def test_a_line_for_a_model_without_workers_yields_its_slot_and_is_given_up_in_the_end() -> None:
    load = GatewayLoad(free=100, bound=0, people_waiting=0, lines_waiting=0)
    slots = Slots(lambda: load, share=1, max_in_flight=1)
    back = False
    assert await slots.take(lambda: False)
    waiting = asyncio.get_running_loop().create_task(slots.without(lambda: back))
    await until(lambda: slots.in_flight == 0)
    assert await slots.take(lambda: False)
    back = True
    assert not waiting.done()
    slots.give()
    await waiting
    assert slots.in_flight == 1
    dropped = asyncio.get_running_loop().create_task(slots.without(lambda: False))
    await until(lambda: slots.in_flight == 0)
    dropped.cancel()
    await asyncio.gather(dropped, return_exceptions=True)
    assert slots.in_flight == 1, "its holder gives it"


async def test_shares_that_wait_for_slots_get_them_in_turn() -> None:
    load = GatewayLoad(free=100, bound=0, people_waiting=0, lines_waiting=0)
    slots = Slots(lambda: load, share=1, max_in_flight=2)
    taken: list[str] = []

    async def run_lines(share: str) -> None:
        for _ in range(20):
            assert await slots.take(lambda: False)
            taken.append(share)
            asyncio.get_running_loop().call_soon(slots.give)

    await asyncio.gather(*(run_lines(share) for share in "abc"))
    for end in range(len(taken)):
        counts = [taken[:end].count(share) for share in "abc"]
        assert max(counts) - min(counts) <= 3, "the first share took its slots before the others came"


async def test_a_line_that_can_go_on_gets_the_next_free_slot_although_shares_wait_for_it() -> None:
    load = GatewayLoad(free=100, bound=0, people_waiting=0, lines_waiting=0)
    slots, loop = Slots(lambda: load, share=1, max_in_flight=1), asyncio.get_running_loop()
    taken, over = 0, False

    async def run_lines() -> None:
        nonlocal taken
        while not over:
            if await slots.take(lambda: over):
                taken += 1
                loop.call_later(0.01, slots.give)

    async def passed_by() -> int:
        """Return how many slots others got from when the line could go on until it did."""
        assert await slots.take(lambda: False)
        before, when_able = taken, 0

        def able() -> bool:
            nonlocal when_able
            when_able = when_able or (taken if taken > before else 0)
            return when_able > 0

        await slots.without(able)
        found = taken - when_able
        slots.give()
        return found

    others = [loop.create_task(run_lines()) for _ in range(3)]
    try:
        assert [await passed_by() for _ in range(5)] == [0] * 5
    finally:
        over = True
        await asyncio.gather(*others)


class ImageLines:
    """Stands for a line's reader, intake, answers and queue. Each line has images of one size, and ends on request."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.running = self.most = self.answered = 0
        self.go_on = asyncio.Event()

    async def read(self, _body: object, _arrival: object) -> tuple[Any, Any]:
        return SimpleNamespace(stream=False, choices=1), lambda *_args, **_named: self

    def max_image_bytes(self, _parsed: object) -> int:
        return self.size_bytes

    def model(self, _parsed: object, _allowed: object) -> Any:
        return SimpleNamespace(routed="mine", adapter_name="")

    async def fetched(self, parsed: Any, _model: object, _arrival: object) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        return parsed

    async def choices(self, *_args: object) -> list[Any]:
        return []

    def check_room(self, _choices: int) -> None: ...

    def submit(self, _generations: object) -> None: ...

    async def reply(self) -> object:
        await self.go_on.wait()
        self.running -= 1
        self.answered += 1
        return {}


async def test_lines_with_images_wait_for_room_without_their_slots_and_all_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits, count = 3, 10
    pictures, texts = ImageLines(MAX_IMAGE_BYTES // fits), ImageLines(0)
    load = GatewayLoad(free=100, bound=0, people_waiting=0, lines_waiting=0)
    slots = Slots(lambda: load, share=1, max_in_flight=count)
    served = ServedModels(lambda: [WorkerView("mine", "mine", "k", True, True, True, 0, 0, 0)], ["mine"], ManualClock())
    loop, share = asyncio.get_running_loop(), Share(job_id="batch_1", endpoint="/v1/completions", models=["mine"])

    async def ask(lines: ImageLines) -> None:
        assert await slots.take(lambda: False)
        monkeypatch.setitem(cast("dict[str, Any]", line_request._ROUTES), "/v1/completions", lines)
        requester = requesters[id(lines)]
        try:
            await requester.ask(share, read())
        finally:
            slots.give()

    of_both: Any = pictures, texts
    requesters = {id(each): LineRequester(each, each, slots, served, ManualClock()) for each in of_both}
    asking = [loop.create_task(ask(pictures)) for _ in range(count)]
    await until(lambda: slots.in_flight == fits and pictures.running == fits, what="the others to give their slots")
    texts.go_on.set()
    await ask(texts)
    assert (texts.answered, pictures.answered) == (1, 0)
    monkeypatch.setitem(cast("dict[str, Any]", line_request._ROUTES), "/v1/completions", pictures)
    pictures.go_on.set()
    await asyncio.gather(*asking)
    assert (pictures.answered, pictures.most, slots.in_flight) == (count, fits, 0)


@pytest.mark.parametrize(("others", "expected_s"), [(True, AWAY_S), (False, 0.0)])
def test_a_model_counts_as_absent_only_while_others_have_workers(others: bool, expected_s: float) -> None:
    clock = ManualClock()
    there = {"other"} if others else set()
    views = {name: WorkerView(name, name, "k", True, True, True, 0, 0, 0) for name in ("mine", "other")}
    served = ServedModels(lambda: [views[name] for name in sorted(there)], list(views), clock)
    for _ in range(int(AWAY_S) + 1):
        found_s = served.away_s("mine")
        clock.advance_ms(1000)
    assert found_s == expected_s
    there.add("mine")
    clock.advance_ms(1000)
    assert (served.has("mine"), served.away_s("mine")) == (True, 0.0)
    there.remove("mine")
    clock.advance_ms(1000)
    assert served.away_s("mine") == 0.0
    clock.advance_ms((FORGET_S + 1) * 1000)
    assert served.away_s("mine") == 0.0, "the state in between is unknown"
