"""Tests of logprobs of both routes in the format of OpenAI's API."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.reports import Logprob
from libs.model.info import load_model_info
from libs.model.tokenizer import load_tokenizer
from services.gateway.request.choice import Piece, TokenLogprob
from services.gateway.request.formats import ChatFormat, CompletionFormat

SIM = load_tokenizer(load_model_info("builtin:sim"))
A, B, C = b"abc"


def piece(sampled: int, value: float, *top: tuple[int, float]) -> Piece:
    return Piece(logprobs=[TokenLogprob(sampled, Logprob(value, top), 0)])


@pytest.mark.parametrize(
    ("shown", "top"),
    [
        (piece(C, -3, (A, -1), (B, -2)), {"a": -1, "b": -2, "c": -3}),
        (piece(A, -1, (A, -1), (B, -2)), {"a": -1, "b": -2}),
        (piece(C, -3), {"c": -3}),
    ],
    ids=["not among the likely ones", "among them", "with none asked for"],
)
def test_a_completions_sampled_token_is_always_among_its_top_logprobs(shown: Piece, top: dict[str, float]) -> None:
    logprobs = CompletionFormat(SIM, logprobs=True).chunk(0, shown).logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [top]
    assert list(logprobs.top_logprobs[0]) == list(top), "the most likely first"


def test_a_chats_top_logprobs_are_the_requested_number_of_most_likely_tokens() -> None:
    shown = ChatFormat(SIM, logprobs=True)
    for found, names in ((piece(C, -3, (A, -1), (B, -2)), ["a", "b"]), (piece(C, -3), [])):
        logprobs = shown.whole(0, found).logprobs
        assert logprobs is not None
        (token,) = logprobs.content
        assert (token.token, token.logprob, [top.token for top in token.top_logprobs]) == ("c", -3, names)


tokens = st.integers(0, 255)


@given(sampled=tokens, value=st.floats(-20, 0), top=st.dictionaries(tokens, st.floats(-20, 0), max_size=5))
def test_lists_agree_on_the_sampled_token_even_if_tokens_have_equal_text(
    sampled: int, value: float, top: dict[int, float]
) -> None:
    shown = piece(sampled, value, *{**top, **({sampled: value} if sampled in top else {})}.items())
    logprobs = CompletionFormat(SIM, logprobs=True).chunk(0, shown).logprobs
    assert logprobs is not None
    (found,), (name,) = logprobs.top_logprobs, logprobs.tokens
    assert found[name] == logprobs.token_logprobs[0] == value
    assert len(found) <= len(top) + 1
