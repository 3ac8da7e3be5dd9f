"""Properties of parsers of reasoning and calls: cuts of the text do not matter, and tags are never shown."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.answers.calls import (
    DeepSeekCalls,
    GlmCalls,
    HermesCall,
    KimiCalls,
    LlamaCalls,
    MiniMaxCalls,
    MistralCalls,
    QwenCoderCalls,
    SeedCalls,
)
from services.gateway.answers.families import CALLS, REASONING, CallFormat, TaggedParser
from services.gateway.answers.parts import PartKind

THINK = REASONING["think"]
TOOLS: dict[str, dict[str, Any]] = {
    "f": {},
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
}
CONTENT, REASONED, CALL, ARGUMENTS = PartKind.CONTENT, PartKind.REASONING, PartKind.CALL, PartKind.ARGUMENTS
Parts = list[tuple[PartKind, str]]


def parsed(
    text: str, cuts: Iterable[int], calls: CallFormat | None = None, thinking: bool = False, thinks: bool = False
) -> Parts:
    """Return the joined parts of the answer; `text` comes in pieces cut at `cuts`."""
    parser = TaggedParser(THINK if thinking or thinks else None, calls, TOOLS, thinks=thinks)
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    found = [part for at, end in pairwise(places) for part in parser.text(text[at:end])]
    joined: Parts = []
    for part in found + parser.end():
        if joined and joined[-1][0] is part.kind and part.kind is not CALL:
            joined[-1] = (part.kind, joined[-1][1] + part.text)
        else:
            joined.append((part.kind, part.text))
    return joined


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "P}\\"</tool_call>"}}\n</tool_call>'
RECORDED: dict[str, tuple[str, CallFormat | None, bool, Parts]] = {
    "reasoning": (
        "<think>\nLet a < b.\n</think>\n\nYes, a < b.\n", None, False,
        [(REASONED, "Let a < b."), (CONTENT, "Yes, a < b.\n")],
    ),
    "reasoning that the prompt opened": (
        "So?\n\nSo.\n</think>\n\n Yes", None, True, [(REASONED, "So?\n\nSo."), (CONTENT, "Yes")],
    ),
    "reasoning without an end": ("<think>\nHm", None, False, [(REASONED, "Hm")]),
    "no reasoning": (" <thinner>", None, False, [(CONTENT, " <thinner>")]),
    "empty reasoning": ("<think>\n\n</think>\n\nYes", None, False, [(CONTENT, "Yes")]),
    "qwen: reasoning, content, calls": (
        f'<think>\nHm.\n</think>\n\nI look.\n{HERMES}\n<tool_call>\n{{"arguments": {{}}, "name": "f"}}\n</tool_call>',
        HermesCall, False,
        [
            (REASONED, "Hm."), (CONTENT, "I look."),
            (CALL, "weather"), (ARGUMENTS, '{"city": "P}\\"</tool_call>"}'), (CALL, "f"), (ARGUMENTS, "{}"),
        ],
    ),
    "hermes: arguments as text, none": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name":"f"}</tool_call>',
        HermesCall, False, [(CALL, "f"), (ARGUMENTS, '{"a": 1}'), (CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "hermes: broken off": ('<tool_call>{"name": "f", "arg', HermesCall, False, [(CALL, "f")]),
    "hermes: no JSON": ("<tool_call>call f!</tool_call>", HermesCall, False, [(CONTENT, "call f!")]),
    "hermes: an open brace": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>Done', HermesCall, False,
        [(CALL, "f"), (ARGUMENTS, '{"a": 1}'), (CONTENT, "Done")],
    ),
    "llama": (
        '{"name": "f", "parameters": {"a": [1, {"b": 2}]}}; {"name": "weather", "parameters": {}}', LlamaCalls, False,
        [(CALL, "f"), (ARGUMENTS, '{"a": [1, {"b": 2}]}'), (CALL, "weather"), (ARGUMENTS, "{}")],
    ),
    "llama: by its tag": (
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', LlamaCalls, False,
        [(CALL, "f"), (ARGUMENTS, '{"a": 1}')],
    ),
    "llama: no tool of this name": (
        '{"name": "Ada", "parameters": {}} is', LlamaCalls, False, [(CONTENT, '{"name": "Ada", "parameters": {}} is')],
    ),
    "llama: in mid-text": ('See {"name": "f"}', LlamaCalls, False, [(CONTENT, 'See {"name": "f"}')]),
    "mistral: a list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "weather", "arguments": {}}]',
        MistralCalls, False, [(CALL, "f"), (ARGUMENTS, '{"x": "]"}'), (CALL, "weather"), (ARGUMENTS, "{}")],
    ),
    "mistral: by name": (
        'Well.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"y": 2}', MistralCalls, False,
        [(CONTENT, "Well."), (CALL, "f"), (ARGUMENTS, '{"x": 1}'), (CALL, "weather"), (ARGUMENTS, '{"y": 2}')],
    ),
    "deepseek v3": (
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        DeepSeekCalls, False,
        [(CONTENT, "Well."), (CALL, "weather"), (ARGUMENTS, '{"a": 1}'), (CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "deepseek v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        DeepSeekCalls, False, [(CALL, "f"), (ARGUMENTS, '{"a": 1}')],
    ),
    "kimi k2": (
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        KimiCalls, False,
        [(CONTENT, "Well."), (CALL, "weather"), (ARGUMENTS, '{"city": "Paris"}'), (CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "qwen3 coder": (
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork </b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[1, \"a\"]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        QwenCoderCalls, False,
        [
            (CONTENT, "I look."), (CALL, "weather"),
            (ARGUMENTS, '{"city": "New\\nYork </b>", "days": 3, "tags": [1, "a"]}'), (CALL, "f"), (ARGUMENTS, "{}"),
        ],
    ),
    "qwen3 coder: texts that look like others": (
        "<tool_call><function=weather><parameter=city>75001</parameter><parameter=days>three</parameter>"
        "<parameter=unit>null</parameter><parameter=what>1</parameter></function></tool_call>Done",
        QwenCoderCalls, False,
        [
            (CALL, "weather"), (ARGUMENTS, '{"city": "75001", "days": "three", "unit": null, "what": "1"}'),
            (CONTENT, "Done"),
        ],
    ),
    "qwen3 coder: broken off": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nPa", QwenCoderCalls, False, [(CALL, "weather")],
    ),
    "glm 4.5": (
        "<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
        GlmCalls, False,
        [
            (REASONED, "Hm."), (CALL, "weather"), (ARGUMENTS, '{"city": "Paris", "days": 3}'),
            (CALL, "f"), (ARGUMENTS, "{}"),
        ],
    ),
    "minimax m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        MiniMaxCalls, False, [(CALL, "weather"), (ARGUMENTS, '{"city": "Paris"}'), (CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "seed oss": (
        "<seed:tool_call>\n<function=weather>\n<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>",
        SeedCalls, False, [(CALL, "weather"), (ARGUMENTS, '{"unit": "C"}')],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "calls", "thinks", "parts"), RECORDED.values(), ids=RECORDED.keys())
@given(data=st.data())
def test_a_familys_answers_have_the_same_parts_in_any_pieces(
    text: str, calls: CallFormat | None, thinks: bool, parts: Parts, data: st.DataObject
) -> None:
    cuts = data.draw(st.frozensets(st.integers(0, len(text))))
    for at in (cuts, (), range(len(text))):
        assert parsed(text, at, calls, thinking=True, thinks=thinks) == parts


SCRAPS = [
    "{", "}", "[", "]", '"name"', '"arguments"', '"parameters"', '"f"', ":", ",", ";", '"', "\\", " ", "\n", "x", "<",
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", '<invoke name="', '">', "</invoke>",
    THINK.opens, THINK.closes, *(tag for found in CALLS.values() for tag in (*found.opens, *found.specials)),
]  # fmt: skip
scraps = st.lists(st.sampled_from(SCRAPS), max_size=20).map("".join)
formats = st.sampled_from([None, *CALLS.values()])


@given(text=scraps, calls=formats, thinking=st.booleans(), thinks=st.booleans(), cuts=st.frozensets(st.integers(0, 99)))
def test_cuts_do_not_change_the_parts_of_any_answer(
    text: str, calls: CallFormat | None, thinking: bool, thinks: bool, cuts: frozenset[int]
) -> None:
    whole = parsed(text, (), calls, thinking, thinks)
    assert parsed(text, cuts, calls, thinking, thinks) == whole
    assert parsed(text, range(len(text)), calls, thinking, thinks) == whole


@given(text=scraps, thinks=st.booleans())
def test_reasoning_ends_at_its_tag_and_the_tag_is_not_shown(text: str, thinks: bool) -> None:
    found = parsed(text, range(len(text)), None, thinking=True, thinks=thinks)
    reasoning = "".join(part for kind, part in found if kind is REASONED)
    assert THINK.closes not in reasoning
    begins = thinks or text.lstrip().startswith(THINK.opens)
    body = text if thinks else text.lstrip().removeprefix(THINK.opens)
    assert reasoning == (body.partition(THINK.closes)[0].strip() if begins else "")


def test_a_special_token_is_a_tag_or_nothing() -> None:
    parser = TaggedParser(REASONING["mistral"], None, TOOLS, thinks=False)
    found = [*parser.special("<s>"), *parser.special("[THINK]"), *parser.text("a"), *parser.special("</s>")]
    found += [*parser.special("[/THINK]"), *parser.text("b")]
    assert [(part.kind, part.text) for part in found] == [(REASONED, "a"), (CONTENT, "b")]
