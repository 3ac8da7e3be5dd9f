"""The incremental decoder against decoding all at once."""

from hypothesis import given
from hypothesis import strategies as st

from libs.model.info import load_model_info
from libs.model.tokenizer import MAX_HELD_TOKENS, load_tokenizer

SIM = load_tokenizer(load_model_info("builtin:sim"))


@given(st.text())
def test_pieces_join_to_the_text_and_are_whole_characters(text: str) -> None:
    decoder = SIM.decoder()
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) + decoder.flush() == text


@given(st.lists(st.integers(0, 259), max_size=MAX_HELD_TOKENS - 1))
def test_any_tokens_stream_to_what_they_decode_to(token_ids: list[int]) -> None:
    decoder = SIM.decoder()
    pieces = [decoder.push(token) for token in token_ids]
    assert "".join(pieces) + decoder.flush() == SIM.decode(token_ids)
