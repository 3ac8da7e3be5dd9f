"""Tests of encoding, chat templates and incremental decoding."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as InnerTokenizer

from libs.contracts.errors import InvalidRequest, StartupError
from libs.model.chat import Arguments, ChatTemplate
from libs.model.info import ModelInfo, load_model_info
from libs.model.prepare import FILES, OTHER_FILES
from libs.model.tokenizer import ADDITIONAL_TEMPLATES, MAX_HELD_TOKENS, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def sim() -> Tokenizer:
    return load_tokenizer(load_model_info("builtin:sim"))


def test_sim_tokens_are_bytes_and_specials(sim: Tokenizer) -> None:
    assert sim.encode("é<|im_end|>\n", add_special_tokens=True) == [0xC3, 0xA9, 259, 10]
    assert [sim.token_bytes(token) for token in (0xC3, 10, 259, 999)] == [b"\xc3", b"\n", b"<|im_end|>", b""]


def test_sim_chat_is_chatml(sim: Tokenizer) -> None:
    text = sim.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


PARTS = [{"type": "text", "text": "Describe"}, {"type": "text", "text": "this"}]
LOOP = "{% for part in message.content %}{{ part.text }}|{% endfor %}"
BOTH = f"{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{LOOP}{{% endif %}}"
MACRO = "{% macro shown(content) %}" + LOOP.replace("message.content", "content") + "{% endmacro %}"
SHAPES = {
    "a text": ("{{ message.content }}", "user", "Describe\nthis", "Hi"),
    "a text, of tools": (LOOP, "tool", "Describe\nthis|", "Hi|"),
    "parts": (LOOP, "user", "Describe|this|", "Hi|"),
    "parts or a text": (BOTH, "user", "Describe|this|", "Hi"),
    "parts, by a variable": (
        "{% set said = message['content'] %}" + LOOP.replace("message.content", "said"),
        "user",
        "Describe|this|",
        "Hi|",
    ),
    "parts, by a macro": (MACRO + "{{ shown(message.content) }}", "user", "Describe|this|", "Hi|"),
    "parts, by a filter": (
        "{{ message.get('content') | map(attribute='text') | join('|') }}",
        "user",
        "Describe|this",
        "Hi",
    ),
}


@pytest.mark.parametrize(("body", "role", "parts", "text"), SHAPES.values(), ids=SHAPES)
def test_a_template_gets_contents_in_the_form_that_it_supports(body: str, role: str, parts: str, text: str) -> None:
    template = ChatTemplate(f"{{% for message in messages %}}{body}{{% endfor %}}", {})
    assert template.render([{"role": role, "content": PARTS}]) == parts
    assert template.render([{"role": role, "content": "Hi"}]) == text


CALLS = [{"type": "function", "function": {"name": "f", "arguments": Arguments({"a": 1}, '{"a":1}')}}]
NULLS = {
    "is none": ("{{ 'none' if content is none else content }}", "none"),
    "equals none": ("{{ 'none' if None != content else content }}", "[]"),
    "is defined": ("{{ 'some' if 'content' in messages[0] else 'left out' }}", "left out"),
    "printed": ("{{ content }}.", "."),
    "joined": ("{{ content + '.' }}", "."),
    "parts": ("{% for part in content %}{{ part.text }}{% endfor %}.", "."),
}


@pytest.mark.parametrize(("body", "shown"), NULLS.values(), ids=NULLS)
def test_null_content_is_what_a_template_expects(body: str, shown: str) -> None:
    template = ChatTemplate("{% set content = messages[0].content %}" + body, {})
    assert template.render([{"role": "assistant", "content": None, "tool_calls": CALLS}]) == shown.replace("[]", "None")


def test_a_calls_arguments_are_an_object_and_keep_the_text_that_the_model_wrote() -> None:
    template = ChatTemplate(
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a | tojson }} {{ a }} {{ a.a }}", {}
    )
    assert template.render([{"role": "assistant", "content": "", "tool_calls": CALLS}]) == '{"a": 1} {"a":1} 1'


def test_tools_and_documents_are_none_if_there_are_none() -> None:
    template = ChatTemplate("{{ tools is none }}{{ documents is none }}{{ tools is defined }}", {})
    assert template.render([{"role": "user", "content": "x"}]) == "TrueTrueTrue"
    variables = {"documents": [{"text": "d"}]}
    assert ChatTemplate("{{ documents[0].text }}", {}).render([], variables=variables) == "d"
    with pytest.raises(InvalidRequest, match="documents must be"):
        template.render([], variables={"documents": ["d"]})


@pytest.mark.parametrize(
    ("source", "role"), [("{{ messages[0].role }}", "system"), ("{{ messages[0].role == 'developer' }}", "True")]
)
def test_developer_becomes_system_for_templates_that_do_not_know_it(source: str, role: str) -> None:
    assert ChatTemplate(source, {}).render([{"role": "developer", "content": "x"}]) == role


def test_a_last_message_is_continued_where_its_text_ends(sim: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    whole = sim.render_chat(chat, opens_answer=False)
    assert sim.render_chat(chat, opens_answer=False, continues=True) == whole.removesuffix("<|im_end|>\n")
    for content in (None, []):
        with pytest.raises(InvalidRequest, match="no text to continue"):
            sim.render_chat([{"role": "assistant", "content": content}], opens_answer=False, continues=True)
    with pytest.raises(InvalidRequest, match="does not show the last message as it is"):
        ChatTemplate("{{ messages[0].content | upper }}", {}).render(chat[1:], opens_answer=False, continues=True)


def test_a_variable_set_within_a_generation_block_is_not_visible_after_it() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source, {}).render([]) == "21"


@pytest.mark.parametrize("source", ["{{ f() }}", "{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
def test_every_error_in_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        ChatTemplate(source, {}).render([])


@pytest.mark.parametrize("text", ["hello", "naïve 日本語", "👩‍👩‍👧 family", "\U0001f9e8", "a\u0301"])
def test_decoder_emits_whole_characters_that_join_to_the_text(sim: Tokenizer, text: str) -> None:
    decoder = sim.decoder()
    pieces = [decoder.push(token) for token in sim.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert decoder.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces)


def test_the_decoder_omits_special_tokens(sim: Tokenizer) -> None:
    decoder = sim.decoder()
    assert [decoder.push(token) for token in (258, 65, 259)] == ["", "A", ""]


def test_a_character_that_never_ends_is_flushed_as_replacement(sim: Tokenizer) -> None:
    decoder = sim.decoder()
    assert decoder.push(0xE6) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_invalid_bytes_are_held_for_a_bounded_number_of_tokens(sim: Tokenizer) -> None:
    decoder = sim.decoder()
    pieces = [decoder.push(0x80) for _ in range(3 * MAX_HELD_TOKENS)]
    assert "".join(pieces) == "\ufffd" * 3 * MAX_HELD_TOKENS


def test_a_template_has_the_names_that_models_use() -> None:
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


def test_other_kinds_of_tokenizer_are_decoded(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    tokenizer = load_tokenizer(model_in(tmp_path))
    decoder = tokenizer.decoder()
    tokens = [1, 2, 3, *(4 + byte for byte in "é".encode())]
    assert [decoder.push(token) for token in tokens] == ["he", "llo", " you", "", "é"]
    assert tokenizer.token_bytes(3) == b" you"
    assert tokenizer.token_bytes(4 + 0xC3) == b"\xc3"


def test_a_template_file_precedes_the_config_and_special_tokens_come_from_the_config(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "old"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(model_in(tmp_path)).render_chat([]) == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    assert load_tokenizer(model_in(tmp_path)).render_chat([]) == "<s>new"


def test_other_templates_are_read_from_their_own_folder(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "plain", "image_token": "<image>"}))
    (tmp_path / ADDITIONAL_TEMPLATES).mkdir()
    (tmp_path / ADDITIONAL_TEMPLATES / "tool_use.jinja").write_text("{{ tools | length }}{{ image_token }}")
    (tmp_path / ADDITIONAL_TEMPLATES / "rag.jinja").write_text("rag")
    tokenizer = load_tokenizer(model_in(tmp_path))
    assert tokenizer.takes("tools")
    assert (tokenizer.render_chat([]), tokenizer.render_chat([], tools=[{}])) == ("plain", "1<image>")
    assert "additional_chat_templates/tool_use.jinja" in filter_repo_objects(
        ["additional_chat_templates/tool_use.jinja", "README.md"], allow_patterns=FILES, ignore_patterns=OTHER_FILES
    )


def test_a_model_without_a_template_points_to_completions(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        load_tokenizer(model_in(tmp_path)).render_chat([{"role": "user", "content": "x"}])


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load_tokenizer(model_in(tmp_path))
