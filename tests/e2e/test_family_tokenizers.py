"""Tests of families' own tokenizers: they identify the family's format, published answers are parsed from their
tokens, and guides over their vocabularies lead to calls that can be parsed."""

import json
import os
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import validate
from llguidance import LLTokenizer
from tokenizers import Tokenizer as InnerTokenizer

from libs.engine.guides import Guides
from libs.engine.port import SamplingParams
from libs.engine.runner import Chunk
from libs.model.tokenizer import Tokenizer
from libs.testing.engines.real_model import FAMILIES, TokenizerUnavailable, family_tokenizer
from services.gateway.answers.families import AnswerFormat, answer_format
from services.gateway.answers.guide import guide_of
from tests.answer_rig import STREAMS, Stream, shown

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

BY_HAND = {"Llama 3.1": ("", "llama3-json")}
"""Families with configured formats, as the template of the package takes no tools."""
ENDS = {
    "gpt-oss": "<|return|>",
    "Qwen3": "<|im_end|>",
    "DeepSeek V3": "<｜end▁of▁sentence｜>",
    "Llama 3.1": "<|eot_id|>",
}
OTHERS = ("Qwen3-Coder", "DeepSeek V3.1, thinking")
"""Families whose models share a name but have different formats."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MAX_TOKENS = 600
Own = tuple[str, InnerTokenizer, Tokenizer, AnswerFormat]


@pytest.fixture(scope="module", params=FAMILIES)
def own(request: pytest.FixtureRequest) -> Own:
    family: str = request.param
    try:
        inner, tokenizer = family_tokenizer(family)
    except TokenizerUnavailable as error:
        (pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip)(str(error))
    return family, inner, tokenizer, answer_format(tokenizer, BY_HAND.get(family, ("", "")))


def test_a_family_is_recognised_by_its_own_tokenizer(own: Own) -> None:
    family, _, _, shape = own
    thinking = shape.thinking.opens if shape.thinking else ""
    assert (shape.harmony, thinking, shape.calls, shape.fenced) == {
        "gpt-oss": (True, "", "harmony", False),
        "Qwen3": (False, "<think>", "hermes", False),
        "DeepSeek V3": (False, "", "deepseek", True),
        "Llama 3.1": (False, "", "llama3-json", False),
    }[family]


def test_published_answers_are_parsed_from_the_familys_own_tokens(own: Own) -> None:
    family, _, tokenizer, shape = own
    streams = [stream for name, stream in STREAMS.items() if name.startswith(family) and name not in OTHERS]
    assert streams
    for stream in streams:
        tokens = tokenizer.encode(stream.text, add_special_tokens=False)
        assert shown(tokenizer, shape, stream, tokens) == stream.shown


def test_a_guide_over_the_familys_vocabulary_leads_to_a_call_that_can_be_parsed(own: Own) -> None:
    family, inner, tokenizer, shape = own
    size = inner.get_vocab_size()
    end = inner.token_to_id(ENDS[family])
    guides = Guides(LLTokenizer(inner.to_str(), n_vocab=size, eos_token=[end]))
    marks = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    tools = [("get_weather", SCHEMA)]
    guide = guide_of(shape, marks, schema=None, tools=tools, parallel=False, thinks=False)
    texts = [inner.token_to_id(text) for text in ('"', '"}', "}", '"},')]
    closing = np.array([token for token in (*texts, *marks.values()) if token is not None and token < size])
    for seed in range(3):
        random, tokens = Random(seed), [0]
        while len(tokens) < MAX_TOKENS:
            history = np.array(tokens, np.int32)
            chunk = Chunk(
                1, history[-1:], len(tokens) - 1, np.zeros(1, np.int32), True, SamplingParams(guide=guide), history, 1
            )
            allowed = guides.allowed(chunk)
            if allowed[end] or (shape.harmony and tokens[-1] == marks.get("<|call|>")):
                break
            likely = closing[allowed[closing]] if random.random() < 0.5 else closing[:0]
            tokens.append(int(random.choice(likely if len(likely) else np.flatnonzero(allowed))))
        found = shown(tokenizer, shape, Stream("", (), "", []), tokens[1:])
        parts = [part for part in found if part[0] != "REASONING"]
        (kind, name), (of, arguments) = parts
        assert (kind, name, of) == ("CALL", "get_weather", "ARGUMENTS")
        validate(json.loads(arguments), SCHEMA)
