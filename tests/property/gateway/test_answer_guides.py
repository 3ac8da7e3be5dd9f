"""Properties of guided answers: their parts are calls of the tools or JSON of the schema."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate
from llguidance import LLTokenizer
from tokenizers import AddedToken

from libs.engine.guides import Guides
from libs.engine.port import SamplingParams
from libs.engine.runner import Chunk
from libs.model.chat import ChatTemplate
from libs.model.info import SIM_EOS, sim_tokenizer
from libs.model.tokenizer import Tokenizer
from libs.testing.engines.harmony import MARKERS
from services.gateway.answers.calls import GlmCalls, KimiCalls
from services.gateway.answers.families import AnswerFormat, answer_format
from services.gateway.answers.guide import guide_of
from services.gateway.answers.parts import AnswerReader, PartKind

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "</think>", '"}']},
        "c": {"type": "array"},
        "d": {"type": "string", "maxLength": 6},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [("f", SCHEMA), ("g", {"type": "object"})]
MAX_TOKENS = 4000
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, str]]] = {
    "hermes": ("<tool_call>", (), ("", "")),
    "qwen3": ("<tool_call> </think>", (), ("", "")),
    "hermes, special tags": ("<tool_call>", ("<tool_call>", "</tool_call>"), ("", "")),
    "qwen3, tags that are ordinary tokens": (
        "<tool_call> </think>",
        ("~<tool_call>", "~</tool_call>", "~<think>", "~</think>"),
        ("", ""),
    ),
    "llama": ("", (), ("", "llama3-json")),
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",), ("", "")),
    "mistral by name": ("[TOOL_CALLS] [/THINK]", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), ("", "")),
    "deepseek v3": ("<\uff5ctool\u2581calls\u2581begin\uff5c> ```json", (), ("", "")),
    "deepseek v3.1": ("<\uff5ctool\u2581calls\u2581begin\uff5c> </think>", (), ("", "")),
    "kimi k2": ("<|tool_calls_section_begin|>", (), ("", "")),
    "kimi k2, special marks": ("<|tool_calls_section_begin|>", (*KimiCalls.opens, *KimiCalls.specials), ("", "")),
    "qwen3 coder": ("<tool_call> <function=", (), ("", "")),
    "qwen3 coder, special tags": ("<tool_call> <function=", ("<tool_call>", "</tool_call>"), ("", "")),
    "glm": ("<tool_call> <arg_key> </think>", (), ("", "")),
    "glm, special marks": ("<tool_call> <arg_key>", (*GlmCalls.opens, *GlmCalls.specials), ("", "")),
    "minimax m2": ("<minimax:tool_call>", (), ("", "")),
    "seed oss": ("<seed:tool_call> </seed:think>", (), ("", "")),
    "harmony": ("", MARKERS, ("", "")),
}
"""Text of the template, special tokens (with ~: ordinary ones, as Qwen's tags are), configured formats."""


class Family:
    """A made-up model of one family, over bytes and its special tokens."""

    def __init__(self, sign: str, special: tuple[str, ...], names: tuple[str, str]) -> None:
        inner = sim_tokenizer()
        for text in special:
            (inner.add_tokens if text.startswith("~") else inner.add_special_tokens)(
                [AddedToken(text.removeprefix("~"), special=not text.startswith("~"), normalized=False)]
            )
        self.tokenizer = Tokenizer(inner, ChatTemplate(f"{{{{ tools }}}}{sign}", {}))
        self.format: AnswerFormat = answer_format(self.tokenizer, names)
        self.special = {text: token_id for token_id, text in self.tokenizer.added_tokens.items()}
        size = inner.get_vocab_size()
        self.guides = Guides(LLTokenizer(inner.to_str(), n_vocab=size, eos_token=[SIM_EOS]))

    def answer(self, random: Random, **requested: Any) -> list[int]:
        """Draw tokens among those that the guide allows, with the end wherever it is possible."""
        guide = guide_of(self.format, self.special, **{"parallel": True, "thinks": False, "tools": (), **requested})
        tokens = [0]
        while len(tokens) < MAX_TOKENS:
            allowed: list[int] = np.flatnonzero(self.guides.allowed(chunk(tokens, guide))).tolist()
            among = set(allowed)  # an array would be searched from its start for each of the tokens below
            if SIM_EOS in among:
                return tokens[1:]
            if self.reasons(tokens[1:], requested.get("thinks", False)) and random.random() < 0.1:
                assert self.format.thinking is not None
                tokens += self.format.thinking.closes.encode()
                continue
            closing = [token for token in (*b'"}]<', *range(SIM_EOS + 3, 300)) if token in among]
            tokens.append(random.choice(closing if closing and random.random() < 0.5 else allowed))
        pytest.fail("the answer has no end")

    def reasons(self, tokens: list[int], thinks: bool) -> bool:
        """Return whether open reasoning must be closed by bytes, which chance alone would not find."""
        tags = self.format.thinking
        if tags is None or tags.closes in self.special:
            return False
        text = bytes(tokens).decode(errors="replace")
        in_mid_character = text.endswith("\ufffd")
        return (thinks or text.startswith(tags.opens)) and tags.closes not in text and not in_mid_character

    def parts(self, tokens: list[int], thinks: bool = False) -> list[tuple[PartKind, str]]:
        """Return the joined parts."""
        opened = self.format.thinking.opens if thinks and self.format.thinking else ""
        parser = self.format.parser(dict(TOOLS), opened)
        assert parser is not None
        reader = AnswerReader(parser, self.tokenizer.decoder(), self.tokenizer.special_tokens)
        joined: list[tuple[PartKind, str]] = []
        for part in [part for token in tokens for part in reader.token(token)] + reader.end():
            if joined and joined[-1][0] is part.kind and part.kind is not PartKind.CALL:
                joined[-1] = (part.kind, joined[-1][1] + part.text)
            else:
                joined.append((part.kind, part.text))
        return [part for part in joined if part[0] is not PartKind.REASONING]


def chunk(tokens: list[int], guide: str, sequence_id: int = 1) -> Chunk:
    history = np.array(tokens, np.int32)
    params = SamplingParams(guide=guide)
    return Chunk(sequence_id, history[-1:], len(tokens) - 1, np.zeros(1, np.int32), True, params, history, 1)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    return Family(*request.param)


@given(seed=st.integers(0, 2**32), parallel=st.booleans())
def test_a_required_call_is_a_call_with_arguments_of_its_schema(family: Family, seed: int, parallel: bool) -> None:
    found = family.parts(family.answer(Random(seed), schema=None, tools=TOOLS, parallel=parallel))
    names, arguments = found[::2], found[1::2]
    assert len(names) == len(arguments) >= 1
    assert parallel or len(names) == 1
    for (kind, name), (of, text) in zip(names, arguments, strict=True):
        assert (kind, of) == (PartKind.CALL, PartKind.ARGUMENTS)
        validate(json.loads(text), dict(TOOLS)[name])


@given(seed=st.integers(0, 2**32), thinks=st.booleans())
def test_content_is_json_of_the_schema_after_any_reasoning(family: Family, seed: int, thinks: bool) -> None:
    thinks = thinks and family.format.thinking is not None
    tokens = family.answer(Random(seed), schema=SCHEMA, thinks=thinks)
    ((kind, text),) = family.parts(tokens, thinks)
    assert kind is PartKind.CONTENT
    validate(json.loads(text), SCHEMA)


@given(seed=st.integers(0, 2**32))
def test_tools_beside_a_schema_leave_the_choice(family: Family, seed: int) -> None:
    (kind, text), *more = family.parts(family.answer(Random(seed), schema=SCHEMA, tools=TOOLS))
    if kind is PartKind.CONTENT:
        validate(json.loads(text), SCHEMA)
    else:
        assert {kind for kind, _ in more} <= {PartKind.CALL, PartKind.ARGUMENTS}


@given(seed=st.integers(0, 2**32), data=st.data())
def test_the_allowed_tokens_follow_from_the_previous_tokens_alone(seed: int, data: st.DataObject) -> None:
    """A sequence that moves is new to its worker; one that is computed again goes back; others come between."""
    one = Family(*FAMILIES["hermes"])
    tokens = [0, *one.answer(Random(seed), schema=SCHEMA)]
    guide = guide_of(one.format, one.special, schema=SCHEMA, tools=(), parallel=True, thinks=False)
    other = guide_of(one.format, one.special, schema={"type": "object"}, tools=(), parallel=True, thinks=False)
    places = data.draw(st.lists(st.integers(1, len(tokens)), max_size=8))
    for place in places:
        fresh = Guides(one.guides._vocabulary).allowed(chunk(tokens[:place], guide))
        assert (one.guides.allowed(chunk(tokens[:place], guide)) == fresh).all()
        one.guides.allowed(chunk([0, *b'{"'], other, sequence_id=data.draw(st.integers(1, 2))))
