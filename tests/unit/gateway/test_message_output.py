"""Tests of a message's content blocks, events and end, from pieces of an answer however they are cut."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import FulcrumError, SequenceFailed
from libs.dispatch.generation import ApiFinishReason
from services.gateway.answers.parts import PartKind
from services.gateway.messages.exchange import MessageExchange, MessageOutput
from services.gateway.request.choice import AnswerRun, Choice, Piece

RUNS = [
    AnswerRun(PartKind.REASONING, "thin"),
    AnswerRun(PartKind.REASONING, "king"),
    AnswerRun(PartKind.CONTENT, "say"),
    AnswerRun(PartKind.CALL, "f", "call_1"),
    AnswerRun(PartKind.ARGUMENTS, '{"a"'),
    AnswerRun(PartKind.ARGUMENTS, ": 1}"),
    AnswerRun(PartKind.CALL, "g", "call_2"),
    AnswerRun(PartKind.CONTENT, "more"),
]
BLOCKS = [
    {"type": "thinking", "thinking": "thinking", "signature": ""},
    {"type": "text", "text": "say"},
    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
    {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
    {"type": "text", "text": "more"},
]
USAGE = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3}
STOP = ApiFinishReason.STOP


class Wire:
    """The events that a client receives."""

    def __init__(self) -> None:
        self.body = b""
        self.value: Any = None
        self.ended = False

    async def start(self, _status: int, content_type: str, _headers: Any) -> None:
        assert content_type.startswith("text/event-stream")

    async def part(self, body: bytes, *, more: bool) -> None:
        assert not self.ended
        self.body, self.ended = self.body + body, not more

    async def json(self, status: int, value: object, _headers: Any) -> None:
        self.value = status, json.loads(msgspec.json.encode(value))

    def events(self) -> list[dict[str, Any]]:
        found = []
        for event in self.body.decode().split("\n\n")[:-1]:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


def sent(
    pieces: list[Piece], *, streamed: bool, stop_string: str | None = None, error: FulcrumError | None = None
) -> Wire:
    """Return what is sent of an answer that comes in these pieces and then ends, with an error if there is one."""
    waiting = list(pieces)
    text = SimpleNamespace(
        done=False, error=None, stop_string=stop_string, prompt=None, record=None, reasoning_tokens=None
    )

    async def wait() -> None:
        text.done = len(waiting) < 2
        text.error = error if text.done else None

    def take() -> Piece:
        return waiting.pop(0) if waiting else Piece()

    text.take = take
    generation: Any = SimpleNamespace(prompt_tokens=10, cached_tokens=4, output=[1, 2, 3])
    choice = Choice(0, generation, text)  # type: ignore[arg-type]
    exchange = MessageExchange(choice, "m", "r1", signal=SimpleNamespace(wait=wait), headers={})  # type: ignore[arg-type]
    wire = Wire()
    asyncio.run((exchange.stream if streamed else exchange.whole)(wire))  # type: ignore[arg-type]
    return wire


def whole(runs: list[AnswerRun], finish: ApiFinishReason = STOP, **how: Any) -> Any:
    status, value = sent([Piece(runs=runs, finish=finish)], streamed=False, **how).value
    assert status == 200
    return value


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of events. Fails on an order that the API does not have."""
    first, ping, *middle, delta, last = events
    message = first["message"]
    assert (first["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    assert ping == {"type": "ping"}
    assert (delta["type"], last) == ("message_delta", {"type": "message_stop"})
    blocks: list[dict[str, Any]] = message["content"]
    is_open, arguments = False, ""
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open, arguments = True, ""
            continue
        block = blocks[event["index"]]
        assert is_open and event["index"] == len(blocks) - 1
        if kind == "stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments or "{}")
        elif block["type"] == "tool_use":
            assert event["delta"]["type"] == "input_json_delta"
            arguments += event["delta"]["partial_json"]
        else:
            assert event["delta"]["type"] == f"{block['type']}_delta"
            block[block["type"]] += event["delta"][block["type"]]
    assert not is_open
    return {**message, **delta["delta"], "usage": delta["usage"]}


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerRun]:
    """Draw runs of an answer in any order, with its calls' arguments cut anywhere."""
    runs: list[AnswerRun] = []
    for number in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from([PartKind.CONTENT, PartKind.REASONING, PartKind.CALL]))
        if kind is not PartKind.CALL:
            runs += [AnswerRun(kind, text) for text in draw(st.lists(st.text(min_size=1), min_size=1, max_size=3))]
            continue
        runs.append(AnswerRun(kind, "f", f"call_{number}"))
        written = json.dumps(draw(st.dictionaries(st.text(), st.integers(-9, 9) | st.text(), max_size=3)))
        cut = draw(st.integers(0, len(written)))
        runs += [AnswerRun(PartKind.ARGUMENTS, part) for part in (written[:cut], written[cut:]) if part]
    return runs


@given(answers(), st.data())
def test_a_stream_builds_the_whole_message_however_the_answer_is_cut(
    runs: list[AnswerRun], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(runs)), max_size=6)))
    pieces = [Piece(runs=runs[a:b]) for a, b in zip([0, *cuts], [*cuts, len(runs)], strict=True)]
    for piece in pieces:
        piece.text = ["x"] if piece.runs else []  # a piece without anything in it is not sent
    pieces[-1].finish = STOP
    wire = sent(pieces, streamed=True)
    assert wire.ended
    assert rebuilt(wire.events()) == whole(runs)


def test_blocks_come_in_the_order_in_which_the_model_wrote_them() -> None:
    found = whole(RUNS)
    assert found["content"] == BLOCKS
    assert (found["id"], found["type"], found["role"], found["model"]) == ("msg_r1", "message", "assistant", "m")


def test_input_tokens_are_counted_once_as_computed_or_as_cached() -> None:
    assert whole(RUNS)["usage"] == USAGE
    events = sent([Piece(runs=RUNS, finish=STOP)], streamed=True).events()
    assert events[0]["message"]["usage"] == events[-2]["usage"] == USAGE


@pytest.mark.parametrize(
    ("finish", "stop_string", "reason", "sequence"),
    [
        (STOP, None, "end_turn", None),
        (STOP, "END", "stop_sequence", "END"),
        (ApiFinishReason.LENGTH, None, "max_tokens", None),
        (ApiFinishReason.TOOL_CALLS, None, "tool_use", None),
        (ApiFinishReason.TOOL_CALLS, "END", "tool_use", None),
    ],
)
def test_the_stop_reason_is_named(
    finish: ApiFinishReason, stop_string: str | None, reason: str, sequence: str | None
) -> None:
    found = whole(RUNS, finish, stop_string=stop_string)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    events = sent([Piece(runs=RUNS, finish=finish)], streamed=True, stop_string=stop_string).events()
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_without_any_text_has_no_blocks() -> None:
    assert whole([])["content"] == []


@pytest.mark.parametrize("written", ["", '{"a": ', "[1]", '"a"', '{"a": "\\ud800"}', '{"a":' * 5000])
def test_a_call_whose_text_is_no_object_has_an_empty_input(written: str) -> None:
    output = MessageOutput()
    output.push([AnswerRun(PartKind.CALL, "f", "call_1"), AnswerRun(PartKind.ARGUMENTS, written)])
    output.end()
    assert json.loads(msgspec.json.encode(output.blocks[0]))["input"] == {}


def test_a_calls_numbers_are_exactly_those_of_the_model() -> None:
    output = MessageOutput()
    written = '{"a": 123456789012345678901234567890, "b": 1.10}'
    output.push([AnswerRun(PartKind.CALL, "f", "call_1"), AnswerRun(PartKind.ARGUMENTS, written)])
    output.end()
    assert written in msgspec.json.encode(output.blocks[0]).decode()


def test_an_error_before_anything_was_sent_is_raised() -> None:
    for streamed in (True, False):
        with pytest.raises(SequenceFailed):
            sent([Piece()], streamed=streamed, error=SequenceFailed("lost"))


def test_an_error_in_a_stream_is_its_last_event() -> None:
    wire = sent([Piece(runs=RUNS, text=["x"]), Piece()], streamed=True, error=SequenceFailed("lost"))
    assert wire.ended
    assert wire.events()[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "lost", "code": "sequence_failed", "param": None},
        "request_id": "r1",
    }
