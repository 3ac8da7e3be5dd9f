"""The conversion of text to tokens and back for one model. It reads files of the model's folder, but no weights."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers.decoders import DecodeStream

from libs.contracts.errors import InvalidRequest, StartupError
from libs.model.chat import ChatMessage, ChatTemplate
from libs.model.files import read_json
from libs.model.info import CHATML_TEMPLATE, SIM_SPECIAL_TOKENS, ModelInfo, byte_alphabet, sim_tokenizer

# The upper bound of tokens that wait for the rest of a character. No character needs more.
MAX_HELD_TOKENS = 64

# The folder of named templates beside chat_template.jinja, as transformers writes it.
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# The number of characters per allowed token in the beginning of a text, which alone is encoded to detect excess tokens.
PREFIX_CHARS: Final = 8
# The kinds of pre-tokenizer that split a text from left to right into words. No token spans two words.
_SPLITTERS: Final = frozenset({"ByteLevel", "Digits", "Split", "Punctuation"})
# In UTF-8, every character outside ASCII contains one of these bytes.
_CONTINUATION_BYTES: Final = range(0x80, 0xC0)
# The upper bound of tokens that are searched for a single letter or digit. Vocabularies have these among the first few
# hundred.
_MAX_LEADS_TRIED = 1024


class Tokenizer:
    """A tokenizer that encodes prompts, renders chats and decodes streams. Thread-safe."""

    def __init__(self, inner: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._inner = inner
        self._template = template
        self._bytes_of_char = byte_alphabet()
        self._added = inner.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(inner.decoder)  # as the decoder, or in a sequence of decoders
        self._lead = self._find_lead()
        self._unknown_chars: list[str] = []
        """The ASCII characters that the vocabulary lacks. Encoding drops them."""
        self._max_token_chars = self._find_max_token_chars()
        self.special_tokens = {token_id: str(token.content) for token_id, token in self._added.items() if token.special}
        """The texts of special tokens by id. Ordinary text is never encoded to them."""
        self.added_tokens = {token_id: str(token.content) for token_id, token in self._added.items()}
        """The texts of all added tokens by id: special ones, and tags such as `<tool_call>`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        With `add_special_tokens`, the ids begin and end as the model expects for raw text. A rendered chat already
        contains special tokens.
        """
        # Unlike `encode`, the batch call releases the GIL.
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the tokens of two texts with special tokens around them, and the index of the second's first token.

        The index is 0 if the tokenizer does not separate the texts.
        """
        encoded = self._inner.encode_batch_fast([(first, second)])[0]
        return encoded.ids, encoded.type_ids.index(1) if 1 in encoded.type_ids else 0

    def has_more(self, text: str, most_tokens: int) -> bool:
        """Return whether a text certainly has more than `most_tokens` tokens, without added special ones.

        The text's length and beginning decide. The result is False if only encoding the whole text could show it.
        """
        if self._max_token_chars is None or len(text) <= most_tokens:
            return False
        most_chars = most_tokens * self._max_token_chars
        if len(text) > most_chars and len(text) - sum(map(text.count, self._unknown_chars)) > most_chars:
            return True
        if len(text) <= 2 * PREFIX_CHARS * most_tokens:
            return False
        beginning = text[: PREFIX_CHARS * most_tokens]
        words = self._inner.encode_batch([beginning], add_special_tokens=False)[0].word_ids
        # The rest of the text can change only the last words of the beginning.
        last = max((word for word in words if word is not None), default=0) - 1
        return sum(word is not None and word < last for word in words) > most_tokens

    @property
    def template_text(self) -> str:
        """The source of the chat template; empty without one."""
        return self._template.source if self._template is not None else ""

    def takes(self, name: str) -> bool:
        """Return whether the chat template reads the variable `name`, such as "tools"."""
        return self._template is not None and name in self._template.variables

    def names(self, word: str, *, tools: bool) -> bool:
        """Return whether the chat template for chats with or without `tools` contains `word`, such as "tool_calls"."""
        return self._template is not None and self._template.names(word, tools=tools)

    @property
    def shows_system(self) -> bool:
        """True if a prompt without tools contains the chat's system message."""
        return self._template is not None and self._template.shows_system

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        opens_answer: bool = True,
        continues: bool = False,
    ) -> str:
        """Return the prompt of a chat. Raise InvalidRequest if there is no chat template, or if it refuses the chat."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="model")
        return self._template.render(
            messages, tools=tools, variables=variables, opens_answer=opens_answer, continues=continues
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens without special ones."""
        text: str = self._inner.decode(token_ids, skip_special_tokens=True)
        return text

    def decoder(self) -> "Decoder":
        """Return a new incremental decoder for one sequence."""
        return Decoder(self._inner, self._lead)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text, which may be part of a character; empty for an unknown id."""
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(self._bytes_of_char[char] for char in token)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else str(token).replace("\u2581", " ").encode()

    def _find_max_token_chars(self) -> int | None:
        """Return the characters of the longest token; None if tokens are not consecutive parts of the text.

        Unknown characters, which encoding drops, do not matter.
        """
        model, splitter = self._inner.model, self._inner.pre_tokenizer
        if self._inner.normalizer is not None or type(model).__name__ != "BPE" or splitter is None:
            return None
        step = json.loads(splitter.__getstate__())
        steps = step.get("pretokenizers", [step])
        keeps_text = all(each["type"] in _SPLITTERS and each.get("behavior") != "Removed" for each in steps)
        vocabulary = self._inner.get_vocab(with_added_tokens=False)
        unknown = {byte for letter, byte in self._bytes_of_char.items() if letter not in vocabulary}
        self._unknown_chars = [chr(byte) for byte in sorted(unknown) if byte < _CONTINUATION_BYTES.start]
        if (
            not keeps_text
            or not any(each["type"] == "ByteLevel" for each in steps)
            or unknown.intersection(_CONTINUATION_BYTES)
            or any(token.lstrip or token.rstrip for token in self._added.values())
        ):
            return None
        return max(map(len, (*vocabulary, *(str(token.content) for token in self._added.values()))))

    def _find_lead(self) -> list[int]:
        """Return a token that is text by itself and separates later text; empty for a vocabulary of bytes only."""
        for token_id in range(_MAX_LEADS_TRIED):
            token = self._inner.id_to_token(token_id)
            if token is None or token_id in self._added or _BYTE_TOKEN.fullmatch(token):
                continue
            text = self.decode([token_id])
            if text.isascii() and text.isalnum():
                return [token_id]
        return []


class Decoder:
    """An incremental decoder. Its outputs add up to the text of all tokens, and it never returns half a character.

    If bytes that were returned as characters turn out to be none, the output remains, and each later byte becomes
    U+FFFD.
    """

    def __init__(self, inner: tokenizers.Tokenizer, lead: Sequence[int] = ()) -> None:
        # A stream that restarts in the middle of a text begins after the tokens in `lead`, so that leading spaces
        # remain.
        self._inner = inner
        self._lead = lead
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty for an incomplete character or a special token."""
        try:
            text: str | None = self._stream.step(self._inner, token_id)
        except Exception:  # the library has no narrower exception for a change of text that it has returned
            self._held.append(token_id)
            return self.flush()
        if text:
            self._held.clear()
            return text
        self._held.append(token_id)
        return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """Return the text that was held back and restart the decoder. Bytes that are no character become U+FFFD."""
        text: str = self._inner.decode(self._held, skip_special_tokens=True)
        self._held.clear()
        self._stream = DecodeStream(self._lead, skip_special_tokens=True)
        return text


def load_tokenizer(model: ModelInfo, template_file: str = "") -> Tokenizer:
    """Load the model's tokenizer, with its chat template or the one in `template_file`.

    Raise StartupError that names the faulty file.
    """
    if model.path is None:
        bos, eos, _start, _end = SIM_SPECIAL_TOKENS
        source = read_template(template_file) if template_file else CHATML_TEMPLATE
        return Tokenizer(sim_tokenizer(), ChatTemplate(source, {"bos_token": bos, "eos_token": eos}))
    file = model.path / "tokenizer.json"
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise StartupError(f"{file} cannot be loaded: {error}") from None
    inner.no_truncation()
    inner.no_padding()
    return Tokenizer(inner, _chat_template(model.path, template_file))


def read_template(file: str) -> str:
    """Return the source of a chat template. Raise StartupError that names the file if it is no Jinja template."""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise StartupError(f"the chat template {file} cannot be read: {error}") from None
    if not source.strip():
        raise StartupError(f"the chat template {file} is empty")
    try:
        ChatTemplate(source, {})
    except StartupError as error:
        raise StartupError(f"{file}: {error.message}") from None
    return source


def _chat_template(folder: Path, template_file: str) -> ChatTemplate | None:
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    if template_file:
        return ChatTemplate(read_template(template_file), _special_tokens(folder, config))
    kept = config.get("chat_template")
    named = {"default": kept} if isinstance(kept, str) else {each.get("name"): each["template"] for each in kept or ()}
    # Files take precedence over the config, as in transformers.
    files = {file.stem: file for file in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
    if (default := folder / "chat_template.jinja").exists():
        named, files["default"] = {}, default
    named |= {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    source, with_tools = named.get("default"), named.get("tool_use")
    if source is None and with_tools is None:
        return None
    return ChatTemplate(source, _special_tokens(folder, config), with_tools)


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of named special tokens such as bos_token, including the model's own, such as image_token."""
    legacy = folder / "special_tokens_map.json"
    fields = dict(config)
    # transformers also gives this file precedence over the config.
    if "added_tokens_decoder" not in config and legacy.exists():
        fields |= read_json(legacy)
    extra = fields.get("extra_special_tokens")
    fields |= extra if isinstance(extra, dict) else {}
    own = extra.keys() if isinstance(extra, dict) else ()
    texts = {name: _text_of_token(value) for name, value in fields.items() if name.endswith("_token") or name in own}
    return {name: text for name, text in texts.items() if text is not None}


def _text_of_token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
