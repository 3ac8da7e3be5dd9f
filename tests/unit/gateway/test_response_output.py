"""Tests of a response's items and their events, from pieces of an answer."""

from itertools import count
from typing import Any

import msgspec
import pytest

from services.gateway.answers.parts import PartKind
from services.gateway.request.choice import AnswerRun, Piece
from services.gateway.request.formats import ChatTokenLogprob
from services.gateway.responses.exchange import ResponseOutput

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


def output(named: Any = None) -> ResponseOutput:
    numbers = count()
    return ResponseOutput(lambda prefix: f"{prefix}{next(numbers)}", named)


def shown(found: ResponseOutput) -> Any:
    return msgspec.to_builtins(found.items)


@pytest.mark.parametrize("size", range(1, len(RUNS) + 1))
def test_items_are_the_same_however_the_answer_is_cut(size: int) -> None:
    whole, cut = output(), output()
    whole.push(Piece(runs=RUNS))
    for at in range(0, len(RUNS), size):
        cut.push(Piece(runs=RUNS[at : at + size]))
    whole.end("completed")
    cut.end("completed")
    assert shown(cut) == shown(whole)
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item["type"] for item in shown(whole)] == kinds
    assert [item.get("arguments") for item in shown(whole)[2:4]] == ['{"a": 1}', ""]


def test_only_the_item_that_was_cut_off_is_incomplete() -> None:
    found = output()
    found.push(Piece(runs=RUNS))
    found.end("incomplete")
    assert [item.status for item in found.items] == [*["completed"] * 4, "incomplete"]


def test_an_answer_without_any_text_is_an_empty_message() -> None:
    found = output()
    events = [event.type.removeprefix("response.") for event in found.end("completed")]
    assert events == [
        *("output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done"),
    ]
    assert shown(found)[0]["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_logprobs_accompany_the_text_they_belong_to() -> None:
    def named(entry: Any) -> ChatTokenLogprob:
        return ChatTokenLogprob(entry, -1.0, [], [])

    found, entries = output(named), [["a"], ["b", "c"], ["d"]]
    texts = [[AnswerRun(PartKind.CONTENT, "a")], [], [AnswerRun(PartKind.CONTENT, "bcd")]]
    events = [
        event
        for tokens, runs in zip(entries, texts, strict=True)
        for event in found.push(Piece(logprobs=tokens, runs=runs))  # type: ignore[arg-type]
    ]
    deltas = [[entry.token for entry in event.logprobs] for event in events if event.type.endswith("delta")]  # type: ignore[union-attr]
    found.end("completed")
    assert deltas == [["a"], ["b", "c", "d"]]
    assert [entry["token"] for entry in shown(found)[0]["content"][0]["logprobs"]] == ["a", "b", "c", "d"]
