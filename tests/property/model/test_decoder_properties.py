"""Properties of the incremental decoder against decoding all at once."""

from collections.abc import Sequence
from functools import reduce
from itertools import groupby

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as InnerTokenizer

from libs.model.info import load_model_info
from libs.model.tokenizer import MAX_HELD_TOKENS, Tokenizer, load_tokenizer

SIM = load_tokenizer(load_model_info("builtin:sim"))
WORDS = ("<unk>", "A", "y", "▁he", "llo", "▁", "é", "日")
BYTE_0 = len(WORDS)


def byte_fallback() -> Tokenizer:
    """Build a tokenizer like Llama 2's: characters outside the vocabulary are written byte by byte, one token each."""
    names = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    inner = InnerTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<unk>", special=True)])
    return Tokenizer(inner, None)


FALLBACK = byte_fallback()
words = st.integers(0, BYTE_0 - 1).map(lambda token_id: [token_id])
characters = st.characters(exclude_categories=["Cs"]).map(lambda char: [BYTE_0 + byte for byte in char.encode()])
any_bytes = st.lists(st.integers(BYTE_0, BYTE_0 + 255), max_size=4)


def joined(parts: Sequence[list[int]]) -> list[int]:
    return reduce(list.__add__, parts, [])


def no_space_byte(token_ids: Sequence[int]) -> bool:
    """Vocabularies have a word for the space, so no model writes it as a byte. The library may show a space before
    invalid bytes twice, as itself and as U+FFFD."""
    return BYTE_0 + 0x20 not in token_ids


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    decoder = tokenizer.decoder()
    return "".join([decoder.push(token_id) for token_id in token_ids]) + decoder.flush()


@given(st.text())
def test_pieces_join_to_the_text_and_are_whole_characters(text: str) -> None:
    decoder = SIM.decoder()
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) + decoder.flush() == text


@given(st.lists(st.integers(0, 259), max_size=MAX_HELD_TOKENS - 1))
def test_any_tokens_stream_to_their_decoded_text(token_ids: list[int]) -> None:
    assert streamed(SIM, token_ids) == SIM.decode(token_ids)


@given(st.lists(words | characters, max_size=40).map(joined))
def test_characters_in_bytes_stream_to_their_decoded_text(token_ids: list[int]) -> None:
    assert streamed(FALLBACK, token_ids) == FALLBACK.decode(token_ids)


@given(st.lists(words | characters | any_bytes, max_size=MAX_HELD_TOKENS // 4 - 1).map(joined).filter(no_space_byte))
@example([BYTE_0 + 0xC3, BYTE_0 + 0xA9, BYTE_0 + 0xFF, 2])  # "é" was emitted; decoded as a whole its bytes are not "é"
@example([1, BYTE_0 + 0xFF, 2])
def test_invalid_bytes_lose_nothing(token_ids: list[int]) -> None:
    """A run of bytes decodes to its characters, or to U+FFFD for each byte. The part emitted before the run became
    invalid stays, and the rest equals the library's decoding."""
    shown = [token_id for token_id in token_ids if token_id]  # <unk> is special
    expected = ""
    for is_byte, run in groupby(shown, lambda token_id: token_id >= BYTE_0):
        tokens = list(run)
        if is_byte:
            found = bytes(token_id - BYTE_0 for token_id in tokens)
            whole = whole_characters(found)
            expected += whole + "\ufffd" * (len(found) - len(whole.encode()))
        else:
            expected += "".join(WORDS[token_id].replace("▁", " ") for token_id in tokens)
    assert streamed(FALLBACK, token_ids) == expected.removeprefix(" ")


def whole_characters(found: bytes) -> str:
    """Return the longest prefix that is text; a literal U+FFFD at its end waits for the next token."""
    for length in range(len(found), -1, -1):
        try:
            text = found[:length].decode()
        except UnicodeDecodeError:
            continue
        if length == len(found) or not text.endswith("\ufffd"):
            return text
    return ""


@given(st.integers(0, 3 * MAX_HELD_TOKENS))
def test_words_keep_their_spaces_however_many_invalid_bytes_precede_them(count: int) -> None:
    assert streamed(FALLBACK, [3, *[BYTE_0 + 0x80] * count, 3, 4]) == f"he{chr(0xFFFD) * count} hello"
