"""Tests of answers in each family's published format, token by token. A real vocabulary cuts them, with the family's
markers as one token each or as text, and no cut changes what a client receives. Vocabulary and cuts are SmolLM2's;
those of some families are in tests/e2e/test_family_tokenizers.py."""

import json
from itertools import groupby

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as InnerTokenizer

from libs.model.chat import ChatTemplate
from libs.model.tokenizer import Tokenizer
from libs.testing import golden
from libs.testing.engines.real_model import real_model_folder
from services.gateway.answers.calls import MistralCalls
from services.gateway.answers.families import TaggedParser, answer_format
from tests.answer_rig import HARMONY, STREAMS, TOOLS, Stream, shown

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def vocabulary() -> str:
    return (real_model_folder() / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("special", [True, False], ids=["special", "ordinary"])
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_a_published_answer_is_parsed_from_its_tokens(vocabulary: str, stream: Stream, special: bool) -> None:
    if not special and stream.marks == HARMONY:
        pytest.skip("its markers are known by their ids alone: a user may write their texts")
    inner = InnerTokenizer.from_str(vocabulary)
    marks = [AddedToken(text, special=special, normalized=False) for text in stream.marks]
    (inner.add_special_tokens if special else inner.add_tokens)(marks)
    tokenizer = Tokenizer(inner, ChatTemplate(f"{{{{ tools }}}}{stream.sign}", {}))
    tokens = tokenizer.encode(stream.text, add_special_tokens=False)
    marked = [token for token in tokens if token >= inner.get_vocab_size() - len(marks)]
    assert len(marked) == sum(stream.text.count(text) for text in stream.marks), "a token each"
    assert shown(tokenizer, answer_format(tokenizer), stream, tokens) == stream.shown


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_a_published_answer_whose_markers_are_many_tokens_is_parsed_the_same(vocabulary: str, stream: Stream) -> None:
    if stream.marks == HARMONY:
        pytest.skip("its markers are known by their ids alone")
    tokenizer = Tokenizer(InnerTokenizer.from_str(vocabulary), ChatTemplate(f"{{{{ tools }}}}{stream.sign}", {}))
    tokens = tokenizer.encode(stream.text, add_special_tokens=False)
    assert shown(tokenizer, answer_format(tokenizer), stream, tokens) == stream.shown


RECORDED = json.loads((golden.FOLDER / "mistral_streams.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("pieces", RECORDED.values(), ids=RECORDED.keys())
def test_calls_are_parsed_as_mistrals_own_tokenizers_cut_them(pieces: list[list[str]]) -> None:
    """Recorded with mistral-common 1.13.1, which has these tokenizers: the encoding of an answer with two calls."""
    parser = TaggedParser(None, MistralCalls, TOOLS, thinks=False)
    parts = [
        part for kind, text in pieces for part in (parser.special(text) if kind == "special" else parser.text(text))
    ] + parser.end()
    texts = ["".join(part.text for part in same) for _, same in groupby(parts, lambda part: part.kind)]
    assert texts == ["get_weather", '{"city": "München", "days": 3}', "now", "{}"]
