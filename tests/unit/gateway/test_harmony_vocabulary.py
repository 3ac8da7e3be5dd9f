"""Tests of gpt-oss's channels with a model's own vocabulary, whose tokens are more than a byte."""

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as InnerTokenizer

from libs.model.chat import ChatTemplate
from libs.model.info import load_model_info, sim_tokenizer
from libs.model.tokenizer import Tokenizer, load_tokenizer
from libs.testing.engines.harmony import MARKERS, with_markers
from libs.testing.engines.real_model import real_model_folder
from services.gateway.answers.families import answer_format
from services.gateway.answers.parts import AnswerReader, PartKind


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return with_markers(InnerTokenizer.from_file(str(real_model_folder() / "tokenizer.json")))


def shown(tokenizer: Tokenizer, tokens: list[int]) -> str:
    parser = answer_format(tokenizer).parser({}, "")
    assert parser is not None
    reader = AnswerReader(parser, tokenizer.decoder(), tokenizer.special_tokens)
    parts = [part for token in tokens for part in reader.token(token)] + reader.end()
    return "".join(part.text for part in parts if part.kind is PartKind.CONTENT)


ANSWER = "The capital of France is Paris. \u00c9l\u00e9gant \U0001f1eb\U0001f1f7 日本語!"
THOUGHT = "<|channel|>analysis<|message|>They ask for a capital.<|end|><|start|>assistant"
REASONED = f"{THOUGHT}<|channel|>final<|message|>{ANSWER}"


@pytest.mark.system
@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_an_answer_is_shown_without_its_reasoning(smol: Tokenizer, end: str) -> None:
    tokens = smol.encode(REASONED + end, add_special_tokens=False)
    ids = [smol.encode(text, add_special_tokens=False) for text in MARKERS]
    assert [len(each) for each in ids] == [1] * len(MARKERS)
    first = ids[0][0]
    assert ids == [[first + place] for place in range(len(MARKERS))], "added in order, after all others"
    assert smol.decode(tokens).startswith("analysisThey ask"), "what a decoder alone would show"
    assert shown(smol, tokens) == ANSWER


@pytest.mark.system
def test_a_tool_call_is_not_content(smol: Tokenizer) -> None:
    call = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert shown(smol, smol.encode(call, add_special_tokens=False)) == ""
    early = ' to=functions.get<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert shown(smol, smol.encode(early, add_special_tokens=False)) == ""


def test_models_without_the_markers_are_unchanged() -> None:
    assert not answer_format(load_tokenizer(load_model_info("builtin:sim"))).harmony
    assert answer_format(with_markers(sim_tokenizer())).harmony
    for text in MARKERS[:-1]:
        inner = sim_tokenizer()
        inner.add_special_tokens([AddedToken(other, special=True) for other in MARKERS if other != text])
        assert not answer_format(Tokenizer(inner, None)).harmony
    ordinary = sim_tokenizer()
    ordinary.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    assert not answer_format(Tokenizer(ordinary, None)).harmony, "texts that a user may write are no markers"


SHAPE = """
{%- macro render_message(role, content) -%}
    {{- "<|start|>" + role + "<|message|>" + content + "<|end|>" }}
{%- endmacro -%}
{%- macro identity() -%}
    {%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif -%}
    {{- model_identity + " Current date: " + strftime_now("%Y-%m-%d") + " " + reasoning_effort }}
{%- endmacro -%}
{%- set ns = namespace(developer="") -%}
{{- render_message("system", identity()) }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set ns.developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if ns.developer or tools %}{{- render_message("developer", ns.developer) }}{%- endif %}
{%- for message in loop_messages -%}
    {%- if message.role == "assistant" and "thinking" in message %}{{- raise_exception("no") }}{%- endif %}
    {{- render_message(message.role, message.content) }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""The features such a template uses: macros, a namespace, tests of undefined names, and the date."""


def test_a_harmony_template_renders_up_to_the_start_of_the_answer() -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = ChatTemplate(SHAPE, {}).render(turns)
    assert text.startswith("<|start|>system<|message|>You are a model. Current date: 20")
    assert text.endswith(
        "<|start|>developer<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
    )
