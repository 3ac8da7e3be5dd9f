"""Answers whose reasoning and tool calls are marked by tags, as in most model families. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from services.gateway.answers.calls import CallReader, DeepSeekCalls, HermesCall, LlamaCalls, MistralCalls
from services.gateway.answers.marked_calls import MarkedCalls, Tools
from services.gateway.answers.parts import AnswerPart, PartKind

CallFormat = type[HermesCall | LlamaCalls | MistralCalls | DeepSeekCalls | MarkedCalls]


@dataclass(frozen=True, slots=True)
class Tags:
    opens: str
    closes: str


class _Mode(Enum):
    # At the start of the answer, or after reasoning or calls, with only white space so far.
    BEGIN = auto()
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


class TaggedParser:
    """The Parser of tagged answers. White space around tags is dropped, and tags are never shown."""

    def __init__(self, thinking: Tags | None, calls: CallFormat | None, tools: Tools, *, thinks: bool) -> None:
        """`calls` is None if no tool may be called. `thinks` says that the prompt has already opened the reasoning."""
        self._thinking = thinking
        self._calls = calls
        self._tools = tools
        self._reader: CallReader | None = None
        self._mode = _Mode.REASONING if thinks else _Mode.BEGIN
        # While only content has arrived, white space at its start is the model's own.
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
        """Return text that may belong to a tag, or white space around one."""
        return self._held

    def text(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain so far."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and self._step(parts):
            pass
        return parts

    def special(self, text: str) -> list[AnswerPart]:
        # Tags may be special tokens. Other special tokens have no meaning.
        return self.text(text) if text in self._specials else []

    def end(self) -> list[AnswerPart]:
        """Return the held text as content, or drop it if it is reasoning's trailing white space."""
        held, self._held = self._held, ""
        if self._reader is not None:
            return self._reader.end()
        if self._mode is _Mode.REASONING:
            held = held.rstrip()
            return [AnswerPart(PartKind.REASONING, held)] if held else []
        return [AnswerPart(PartKind.CONTENT, held)] if held and (self._first or held.strip()) else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Advance by one mode; return False if more text is needed."""
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
            # What follows Llama's calls is no call, though it may begin like one.
            self._mode = _Mode.CONTENT if isinstance(self._reader, LlamaCalls) else _Mode.BEGIN
            self._reader, self._first = None, False
        return rest is not None

    @staticmethod
    def _add(parts: list[AnswerPart], kind: PartKind, text: str) -> None:
        if text:
            parts.append(AnswerPart(kind, text))


def _cut(text: str, tags: Sequence[str]) -> tuple[str, str]:
    """Split text into what can be returned and what has to wait: trailing white space and a possible start of a tag."""
    keep = 0
    for tag in tags:
        for size in range(min(len(text), len(tag) - 1), keep, -1):
            if tag.startswith(text[-size:]):
                keep = size
                break
    shown = text[: len(text) - keep].rstrip()
    return shown, text[len(shown) :]
