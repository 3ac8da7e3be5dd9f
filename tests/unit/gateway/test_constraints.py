"""Tests of vLLM's fields of structured output: their translation and their errors."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from libs.contracts.errors import InvalidRequest
from libs.model.grammar import choice_rule, fault_of_rule, pattern_rule
from services.gateway.answers.guide import SchemaCheck
from services.gateway.request.intake import check_schemas
from services.gateway.request.parse import ParsedRequest, parse_chat, parse_completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BYTES = LLTokenizer("byte")


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode())


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def written(rule: str, seed: int) -> str:
    """Return text that the rule allows, one byte per token."""
    matcher, draw, found = LLMatcher(BYTES, f"start: {rule}\n"), random.Random(seed), []
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = draw.choice(np.flatnonzero(mask).tolist())
        if token >= 256:
            break
        matcher.consume_token(token)
        found.append(token)
    return bytes(found).decode()


@pytest.mark.parametrize("ask", [chat, completion])
def test_both_spellings_give_the_same_constraint(ask: Any) -> None:
    for kind, value in (("json", SCHEMA), ("json", json.dumps(SCHEMA)), ("regex", "a+"), ("choice", ["a", "b"])):
        newer, older = ask(structured_outputs={kind: value}), ask(**{f"guided_{kind}": value})
        assert newer.guided and older.guided
        assert (newer.schema, newer.rule) == (older.schema, older.rule)
        assert (newer.schema_field, older.schema_field) == (f"structured_outputs.{kind}", f"guided_{kind}")
    assert ask(structured_outputs={"json_object": True}).schema == {"type": "object"}
    assert not ask(structured_outputs={}).guided


@pytest.mark.parametrize("pattern", [r"[a-c]{2,4}/\d\\", "a/b\\/c", "one\ntwo|three", r"(x|yy)(/z)?"])
def test_a_pattern_must_match_the_whole_answer(pattern: str) -> None:
    assert fault_of_rule(pattern_rule(pattern)) == ""
    for seed in range(10):
        assert re.fullmatch(pattern, written(pattern_rule(pattern), seed))


def test_choices_are_enforced_literally() -> None:
    choices = ["plain", 'with "quotes" and \\', "line\nbreak", "é"]
    assert fault_of_rule(choice_rule(choices)) == ""
    assert {written(choice_rule(choices), seed) for seed in range(60)} == set(choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a" * 20_000}, "guided_regex"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ask", [chat, completion])
def test_an_impossible_constraint_is_refused_by_name(ask: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    assert caught.value.param == param


def test_a_response_format_beside_a_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        chat(guided_regex="a", response_format={"type": "json_object"})


@pytest.mark.system
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(?=b)", "look-around"),
        ("[", "unclosed character class"),
        ("a{5000000}", "too many expressions"),
        (r"[^\x00-\x{10ffff}]", "nothing fits"),
    ],
)
async def test_a_pattern_that_cannot_be_enforced_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await check_schemas(completion(guided_regex=pattern), SchemaCheck())
    assert caught.value.param == "guided_regex"
    await check_schemas(completion(guided_regex="[a-z]+"), SchemaCheck())


GBNF = 'root ::= "SELECT " column (", " column)?\ncolumn ::= [a-z]{2} | "*"'
LARK = 'start: "SELECT " column (", " column)?\ncolumn: /[a-z]{2}/ | "*"'


@pytest.mark.parametrize("grammar", [GBNF, LARK])
def test_a_grammar_accepts_exactly_what_it_derives_in_either_dialect(grammar: str) -> None:
    parsed = completion(structured_outputs={"grammar": grammar})
    assert parsed.rule == chat(guided_grammar=grammar).rule and parsed.schema_field == "structured_outputs.grammar"
    assert fault_of_rule(parsed.rule) == ""
    found = {written(parsed.rule, seed) for seed in range(10)}
    assert len(found) > 1
    assert all(re.fullmatch(r"SELECT ([a-z]{2}|\*)(, ([a-z]{2}|\*))?", text) for text in found)


@pytest.mark.parametrize("grammar", ["root ::= [", 'root ::= "a" (', "root ::= " + "(" * 8000])
def test_a_malformed_grammar_is_refused_with_the_position(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be parsed") as caught:
        completion(guided_grammar=grammar)
    assert caught.value.param == "guided_grammar" and len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [("start: other", "unknown name"), ('start: start "a"', "nothing fits it"), ('start: "', "lexer")],
)
def test_a_grammar_that_derives_nothing_is_refused_with_the_reason(grammar: str, reason: str) -> None:
    assert reason in fault_of_rule(completion(guided_grammar=grammar).rule)
