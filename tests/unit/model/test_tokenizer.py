"""Encoding, chat templates and incremental decoding."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as InnerTokenizer

from libs.contracts.errors import InvalidRequest, StartupError
from libs.model.chat import ChatTemplate
from libs.model.info import ModelInfo, load_model_info
from libs.model.tokenizer import MAX_HELD_TOKENS, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def sim() -> Tokenizer:
    return load_tokenizer(load_model_info("builtin:sim"))


def test_sim_tokens_are_bytes_and_specials(sim: Tokenizer) -> None:
    assert sim.encode("é<|im_end|>\n", add_special_tokens=True) == [0xC3, 0xA9, 259, 10]
    assert [sim.token_bytes(token) for token in (0xC3, 10, 259, 999)] == [b"\xc3", b"\n", b"<|im_end|>", b""]


def test_sim_chat_is_chatml(sim: Tokenizer) -> None:
    text = sim.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined(sim: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sim.render_chat([{"role": "user", "content": parts}]) == sim.render_chat([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize("text", ["hello", "naïve 日本語", "👩‍👩‍👧 family", "\U0001f9e8", "a\u0301"])
def test_decoder_emits_whole_characters_that_join_to_the_text(sim: Tokenizer, text: str) -> None:
    decoder = sim.decoder()
    pieces = [decoder.push(token) for token in sim.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert decoder.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces)


def test_decoder_leaves_special_tokens_out(sim: Tokenizer) -> None:
    decoder = sim.decoder()
    assert [decoder.push(token) for token in (258, 65, 259)] == ["", "A", ""]


def test_a_character_that_never_ends_is_flushed_as_replacement(sim: Tokenizer) -> None:
    decoder = sim.decoder()
    assert decoder.push(0xE6) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_bytes_that_are_no_character_are_held_for_a_bounded_number_of_tokens(sim: Tokenizer) -> None:
    decoder = sim.decoder()
    pieces = [decoder.push(0x80) for _ in range(3 * MAX_HELD_TOKENS)]
    assert "".join(pieces) == "\ufffd" * 3 * MAX_HELD_TOKENS


def test_template_has_the_names_that_models_use() -> None:
    source = """
        {%- if messages[0].role != 'user' %}{{ raise_exception('start with user') }}{% endif -%}
        {{ bos_token }}{{ messages | tojson }}{{ strftime_now('%Y')[:2] }}
        {%- for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% break %}{% endfor %}
    """
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "é"}]).strip() == '<s>[{"role": "user", "content": "é"}]20é'
    with pytest.raises(InvalidRequest, match="start with user") as caught:
        template.render([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


def test_template_cannot_reach_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse_stops_the_start() -> None:
    with pytest.raises(StartupError):
        ChatTemplate("{% if %}", {})


def model_in(folder: Path) -> ModelInfo:
    return ModelInfo("tiny", folder, "r", 100, 300, frozenset({0}))


def write_sentencepiece_like(folder: Path) -> None:
    vocab = {"<unk>": 0, "▁he": 1, "llo": 2, "▁you": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    inner = InnerTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<unk>", special=True)])
    inner.save(str(folder / "tokenizer.json"))


def test_other_kinds_of_tokenizer_decode_too(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    tokenizer = load_tokenizer(model_in(tmp_path))
    decoder = tokenizer.decoder()
    tokens = [1, 2, 3, *(4 + byte for byte in "é".encode())]
    assert [decoder.push(token) for token in tokens] == ["he", "llo", " you", "", "é"]
    assert tokenizer.token_bytes(3) == b" you"
    assert tokenizer.token_bytes(4 + 0xC3) == b"\xc3"


def test_template_file_wins_over_config_and_special_tokens_come_from_config(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "old"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(model_in(tmp_path)).render_chat([]) == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    assert load_tokenizer(model_in(tmp_path)).render_chat([]) == "<s>new"


def test_a_model_without_template_points_to_completions(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        load_tokenizer(model_in(tmp_path)).render_chat([{"role": "user", "content": "x"}])


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load_tokenizer(model_in(tmp_path))
