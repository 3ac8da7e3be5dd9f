"""The answer formats of model families, and the detection of a model's format. Pure.

The format is detected from the special tokens and the chat template. Settings can override the result.

Harmony is the format of gpt-oss (https://cookbook.openai.com/articles/openai-harmony). An answer continues the text
`<|start|>assistant` and consists of messages: first `<|channel|>analysis<|message|>...<|end|>`, then
`<|start|>assistant<|channel|>final<|message|>...<|return|>`.

The model reasons in channel analysis. It calls tools in channel commentary, with a recipient (` to=functions.f`) before
or after the channel's name. Recipient and channel are ordinary text between special tokens. Messages without a
recipient are content in channel final or without a channel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from libs.model.tokenizer import Tokenizer
from services.gateway.answers.calls import (
    CallReader,
    DeepSeekCalls,
    GlmCalls,
    HermesCall,
    KimiCalls,
    LlamaCalls,
    MarkedCalls,
    MiniMaxCalls,
    MistralCalls,
    QwenCoderCalls,
    SeedCalls,
    Tools,
)
from services.gateway.answers.parts import AnswerPart, Parser, PartKind

MARKERS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
"""The special tokens by which a vocabulary is recognised as harmony's."""
_START, _CHANNEL, _MESSAGE, *_ENDS = MARKERS
_CONSTRAIN = "<|constrain|>"
# The bound on a message's role, recipient and channel. Messages with longer headers are dropped.
MAX_HEADER_CHARS = 256
_RECIPIENT = " to="
_FUNCTIONS = "functions."


class _HarmonyState(Enum):
    # Before any marker: the text so far may still be the beginning of a recipient. Further text decides.
    OPENING = auto()
    HEADER = auto()
    BODY = auto()


class HarmonyParser:
    """A parser of answers in harmony. It drops markers and headers."""

    def __init__(self, *, calls: bool) -> None:
        """Create a parser. Without `calls`, the request allows no tools, and tool calls are dropped."""
        self._calls = calls
        self._state = _HarmonyState.OPENING
        self._opening = ""
        self._header = "assistant"
        self._channel: str | None = None
        self._kind: PartKind | None = None
        """The kind of the current message; None if its text is dropped."""
        self._empty_call = False

    @property
    def thinking(self) -> bool:
        return self._state is _HarmonyState.BODY and self._kind is PartKind.REASONING

    @property
    def held(self) -> str:
        """The beginning of the answer while it may still be the beginning of a recipient."""
        return self._opening

    def text(self, text: str) -> list[AnswerPart]:
        if self._state is _HarmonyState.OPENING:
            return self._open(text)
        if self._state is _HarmonyState.HEADER:
            self._add(text)
            return []
        if self._kind is None:
            return []
        self._empty_call = False
        return [AnswerPart(self._kind, text)]

    def special(self, text: str) -> list[AnswerPart]:
        """Handle a marker. Other special tokens are ignored."""
        if text == _CONSTRAIN and self._state is _HarmonyState.HEADER:
            self._add(" ")  # a content type follows, which is not part of the preceding text
        if text == _MESSAGE and self._state is not _HarmonyState.BODY:
            return self._begin()
        if text not in (_START, _CHANNEL, *_ENDS):
            return []
        opening, self._opening = self._opening, ""
        parts = self._close()
        if text == _START:
            self._state, self._header, self._channel = _HarmonyState.HEADER, "", None
        elif text == _CHANNEL:
            if self._state is _HarmonyState.BODY:  # a message without its start marker
                self._header = "assistant"
            self._add(opening)
            self._state, self._channel = _HarmonyState.HEADER, ""
        else:
            self._state, self._kind = _HarmonyState.BODY, None
        return parts

    def end(self) -> list[AnswerPart]:
        """Return the text at the answer's beginning as content if no header followed it."""
        opening, self._opening = self._opening, ""
        return [AnswerPart(PartKind.CONTENT, opening)] if opening else self._close()

    def _open(self, text: str) -> list[AnswerPart]:
        self._opening += text
        if _RECIPIENT.startswith(self._opening) and self._opening != _RECIPIENT:
            return []
        begun, self._opening = self._opening, ""
        if begun.startswith(_RECIPIENT):
            self._state = _HarmonyState.HEADER
            self._add(begun)
            return []
        self._state, self._kind = _HarmonyState.BODY, PartKind.CONTENT
        return [AnswerPart(PartKind.CONTENT, begun)]

    def _begin(self) -> list[AnswerPart]:
        self._add(self._opening)
        self._opening, self._state, self._kind = "", _HarmonyState.BODY, None
        words, channel = self._header.split(), (self._channel or "").split()
        if len(self._header) > MAX_HEADER_CHARS or len(self._channel or "") > MAX_HEADER_CHARS:
            return []
        if words[:1] != ["assistant"]:
            return []
        recipient = next((word[3:] for word in (*words[1:], *channel) if word.startswith("to=")), "")
        if recipient:
            return self._call(recipient)
        if len(words) > 1:
            return []
        if self._channel is None or channel[:1] == ["final"]:
            self._kind = PartKind.CONTENT
        elif channel[:1] in (["analysis"], ["commentary"]):
            self._kind = PartKind.REASONING
        return []

    def _call(self, recipient: str) -> list[AnswerPart]:
        name = recipient.removeprefix(_FUNCTIONS)
        if not self._calls or name == recipient or not name:
            return []
        self._kind, self._empty_call = PartKind.ARGUMENTS, True
        return [AnswerPart(PartKind.CALL, name)]

    def _close(self) -> list[AnswerPart]:
        """End the current message. A call without text gets the arguments `{}`."""
        empty, self._empty_call = self._empty_call, False
        return [AnswerPart(PartKind.ARGUMENTS, "{}")] if empty else []

    def _add(self, more: str) -> None:
        if self._channel is None:
            self._header += more[: MAX_HEADER_CHARS + 1 - len(self._header)]
        else:
            self._channel += more[: MAX_HEADER_CHARS + 1 - len(self._channel)]


CallFormat = type[HermesCall | LlamaCalls | MistralCalls | DeepSeekCalls | MarkedCalls]


@dataclass(frozen=True, slots=True)
class Tags:
    opens: str
    closes: str


class _Mode(Enum):
    # At the start of the answer, or after reasoning or calls, while only white space has arrived.
    BEGIN = auto()
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


class TaggedParser:
    """A parser of answers in which tags surround reasoning and calls. It drops tags and the white space around them."""

    def __init__(self, thinking: Tags | None, calls: CallFormat | None, tools: Tools, *, thinks: bool) -> None:
        """Create a parser. `calls` is None if no tool may be called.

        With `thinks`, the prompt ends inside the reasoning.
        """
        self._thinking = thinking
        self._calls = calls
        self._tools = tools
        self._reader: CallReader | None = None
        self._mode = _Mode.REASONING if thinks else _Mode.BEGIN
        # White space at the very start of an answer is part of it, unless reasoning or calls follow.
        self._first = not thinks
        self._begun = False
        self._held = ""
        self._specials = {
            *((thinking.opens, thinking.closes) if thinking else ()),
            *((*calls.opens, *calls.specials) if calls else ()),
        }

    @property
    def thinking(self) -> bool:
        return self._mode is _Mode.REASONING

    @property
    def held(self) -> str:
        """The text that may still become part of a tag, or white space next to one."""
        return self._held

    def text(self, text: str) -> list[AnswerPart]:
        """Return the parts of the answer that further text cannot change."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and self._step(parts):
            pass
        return parts

    def special(self, text: str) -> list[AnswerPart]:
        # Tags may be special tokens. Other special tokens have no meaning.
        return self.text(text) if text in self._specials else []

    def end(self) -> list[AnswerPart]:
        """Return the held-back text as a part of the current kind. White space at the end of reasoning is dropped."""
        held, self._held = self._held, ""
        if self._reader is not None:
            return self._reader.end()
        if self._mode is _Mode.REASONING:
            held = held.rstrip()
            return [AnswerPart(PartKind.REASONING, held)] if held else []
        return [AnswerPart(PartKind.CONTENT, held)] if held and (self._first or held.strip()) else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Parse as much as the current mode can. Return False if more text is needed."""
        if self._mode is _Mode.REASONING:
            return self._reason(parts)
        if self._mode is _Mode.CALLS:
            return self._call(parts)
        return self._begin() if self._mode is _Mode.BEGIN else self._show(parts)

    def _begin(self) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        if self._thinking and self._first and self._opens(text, self._thinking.opens, _Mode.REASONING):
            return True
        if self._thinking and self._first and self._thinking.opens.startswith(text):
            return False
        if self._calls is LlamaCalls and text[0] == "{":
            self._held, self._mode, self._reader = text, _Mode.CALLS, LlamaCalls(self._tools)
            return True
        self._mode = _Mode.CONTENT
        if not self._first:
            self._held = text
        return True

    def _opens(self, text: str, tag: str, mode: _Mode) -> bool:
        if not text.startswith(tag):
            return False
        self._held, self._mode = text[len(tag) :], mode
        return True

    def _reason(self, parts: list[AnswerPart]) -> bool:
        assert self._thinking is not None
        self._first = False
        text, tag, rest = self._held.partition(self._thinking.closes)
        if not self._begun:
            text = text.lstrip()
        if tag:
            self._held, self._mode = rest, _Mode.BEGIN
            self._add(parts, PartKind.REASONING, text.rstrip())
            return True
        text, self._held = _cut(text, (self._thinking.closes,))
        self._begun = self._begun or bool(text)
        self._add(parts, PartKind.REASONING, text)
        return False

    def _show(self, parts: list[AnswerPart]) -> bool:
        tags = self._calls.opens if self._calls else ()
        found = min(((at, tag) for tag in tags if (at := self._held.find(tag)) >= 0), default=None)
        if found is not None and self._calls is not None:
            at, tag = found
            text, self._held = self._held[:at].rstrip(), self._held[at + len(tag) :]
            self._first = False
            self._mode, self._reader = _Mode.CALLS, self._calls(self._tools)
            self._add(parts, PartKind.CONTENT, text)
            return True
        text, self._held = _cut(self._held, tags) if tags else (self._held, "")
        self._add(parts, PartKind.CONTENT, text)
        return False

    def _call(self, parts: list[AnswerPart]) -> bool:
        assert self._reader is not None
        more, rest = self._reader.push(self._held)
        parts += more
        self._held = rest or ""
        if rest is not None:
            # Text after Llama's calls is not a call, even if it begins like one.
            self._mode = _Mode.CONTENT if isinstance(self._reader, LlamaCalls) else _Mode.BEGIN
            self._reader, self._first = None, False
        return rest is not None

    @staticmethod
    def _add(parts: list[AnswerPart], kind: PartKind, text: str) -> None:
        if text:
            parts.append(AnswerPart(kind, text))


def _cut(text: str, tags: Sequence[str]) -> tuple[str, str]:
    """Split text into a part to return and a rest to hold back.

    The rest is trailing white space and anything that may be the beginning of a tag.
    """
    keep = 0
    for tag in tags:
        for size in range(min(len(text), len(tag) - 1), keep, -1):
            if tag.startswith(text[-size:]):
                keep = size
                break
    shown = text[: len(text) - keep].rstrip()
    return shown, text[len(shown) :]


HARMONY: Final = "harmony"
NONE: Final = "none"
"""The setting for a model that has no format for reasoning or calls, whatever its template contains."""

REASONING: Final[Mapping[str, Tags]] = MappingProxyType(
    {
        "think": Tags("<think>", "</think>"),  # Qwen3, QwQ, DeepSeek R1, GLM 4.5, SmolLM3, ...
        "mistral": Tags("[THINK]", "[/THINK]"),  # Magistral
        "seed": Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    }
)
"""The reasoning tags by family, as named in settings.

A model belongs to a family if its template has the closing tag.
"""

CALLS: Final[Mapping[str, CallFormat]] = MappingProxyType(
    {
        "deepseek": DeepSeekCalls,
        "kimi-k2": KimiCalls,
        "mistral": MistralCalls,
        "minimax-m2": MiniMaxCalls,
        "seed-oss": SeedCalls,
        "qwen3-coder": QwenCoderCalls,
        "glm": GlmCalls,
        "hermes": HermesCall,
        "llama3-json": LlamaCalls,
    }
)
_CALL_SIGNS: Final = (
    ("deepseek", DeepSeekCalls.opens),
    ("kimi-k2", KimiCalls.opens),
    ("mistral", MistralCalls.opens),
    ("minimax-m2", MiniMaxCalls.opens),
    ("seed-oss", SeedCalls.opens),
    ("qwen3-coder", (*QwenCoderCalls.opens, "<function=")),
    ("glm", (*GlmCalls.opens, "<arg_key>")),
    ("hermes", HermesCall.opens),
    ("llama3-json", ('"name": function name, "parameters":',)),
)
"""The texts by which a template reveals its tool call format. The first format whose texts all occur is chosen."""
# Mistral's chat templates raise an error for call ids of another length.
MISTRAL_ID_CHARS: Final = 9
PROMPT_END_TOKENS: Final = 8
"""The number of tokens at the end of a prompt that are searched for an opening reasoning tag."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format in which a model writes reasoning and tool calls."""

    harmony: bool = False
    thinking: Tags | None = None
    calls: str = ""
    """A key of CALLS, or "harmony". Empty if the format is unknown."""
    fenced: bool = False
    """True if DeepSeek writes arguments in a fenced block of JSON, as its models before V3.1 do."""

    @property
    def reasons(self) -> bool:
        return self.harmony or self.thinking is not None

    def parser(self, tools: Tools, prompt_end: str) -> Parser | None:
        """Return a parser for one answer, or None if the whole answer is content.

        `tools` contains the tools that may be called.
        """
        if self.harmony:
            return HarmonyParser(calls=bool(tools))
        calls = CALLS.get(self.calls) if tools else None
        if self.thinking is None and calls is None:
            return None
        return TaggedParser(self.thinking, calls, tools, thinks=self.thinks(prompt_end))

    def thinks(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has opened the reasoning."""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.opens)


@dataclass(frozen=True, slots=True)
class FormatNames:
    """The formats and templates in the settings, by model name. The name "*" stands for all other models."""

    reasoning: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    """The files of chat templates that replace the models' own templates."""
    as_text: bool = True
    """True if tools are written into the prompt as text when a model's chat template does not support them."""

    def template(self, model: str) -> str:
        """Return the file that replaces a model's chat template, or an empty string if there is none."""
        return self.templates.get(model, self.templates.get("*", ""))

    def of(self, model: str) -> tuple[str, str]:
        """Return the configured names of a model's reasoning and call formats.

        A name that is not configured is empty.
        """
        reasoning, tools = (names.get(model, names.get("*", "")) for names in (self.reasoning, self.tools))
        return reasoning, tools


NO_NAMES: Final = FormatNames()


def answer_format(tokenizer: Tokenizer, names: tuple[str, str] = ("", "")) -> AnswerFormat:
    """Return a model's format. `names` are the configured reasoning and call formats, which override detection."""
    reasoning, tools = names
    special = set(tokenizer.special_tokens.values())
    harmony = special.issuperset(MARKERS) and reasoning in ("", HARMONY)
    if harmony:
        return AnswerFormat(harmony=True, calls="" if tools == NONE else HARMONY)
    template = tokenizer.template_text
    by_template = (tags for tags in REASONING.values() if tags.closes in template)
    thinking = REASONING.get(reasoning) if reasoning else next(by_template, None)
    calls = (tools or _calls_of(template)).replace(NONE, "")
    return AnswerFormat(thinking=thinking, calls=calls, fenced="```json" in template)


def prompt_end(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Return the text of a prompt's last tokens, including special tokens."""
    return b"".join(map(tokenizer.token_bytes, prompt[-PROMPT_END_TOKENS:])).decode(errors="replace")


def _calls_of(template: str) -> str:
    return next((name for name, signs in _CALL_SIGNS if all(sign in template for sign in signs)), "")
