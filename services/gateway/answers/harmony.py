"""Answers in harmony, gpt-oss's format (https://cookbook.openai.com/articles/openai-harmony). Pure.

A generation continues after `<|start|>assistant` and consists of messages:
`<|channel|>analysis<|message|>...<|end|>`, then `<|start|>assistant<|channel|>final<|message|>...<|return|>`.

Reasoning is in channel analysis and tool calls in channel commentary, with a recipient (` to=functions.f`, before
or after the channel's name). Both are ordinary text between special tokens. Content is what the assistant addresses
to the user alone: in channel final, or in no channel at all.
"""

from enum import Enum, auto
from typing import Final

from services.gateway.answers.parts import AnswerPart, PartKind

MARKERS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
"""The special tokens that a vocabulary of this format has."""
_START, _CHANNEL, _MESSAGE, *_ENDS = MARKERS
_CONSTRAIN = "<|constrain|>"
# Bound on a message's role, recipient and channel. A longer header does not belong to an answer.
MAX_HEADER_CHARS = 256
_TO = " to="
_FUNCTIONS = "functions."


class _State(Enum):
    # So far only the start of an answer without any marker, or of a recipient; the next text decides which.
    OPENING = auto()
    HEADER = auto()
    BODY = auto()


class HarmonyParser:
    """The Parser of harmony, which shows neither markers nor headers."""

    def __init__(self, *, calls: bool) -> None:
        """`calls` says whether tools may be called; otherwise calls are dropped."""
        self._calls = calls
        self._state = _State.OPENING
        self._opening = ""
        self._header = "assistant"
        self._channel: str | None = None
        self._kind: PartKind | None = None
        """The kind of the message's text; None hides it."""
        self._empty_call = False

    @property
    def thinking(self) -> bool:
        return self._state is _State.BODY and self._kind is PartKind.REASONING

    @property
    def held(self) -> str:
        """Return the start of the answer while it may become a recipient."""
        return self._opening

    def text(self, text: str) -> list[AnswerPart]:
        """Read text of a header or of a message."""
        if self._state is _State.OPENING:
            return self._open(text)
        if self._state is _State.HEADER:
            self._add(text)
            return []
        if self._kind is None:
            return []
        self._empty_call = False
        return [AnswerPart(self._kind, text)]

    def special(self, text: str) -> list[AnswerPart]:
        """Apply a marker; ignore other special tokens."""
        if text == _CONSTRAIN and self._state is _State.HEADER:
            self._add(" ")  # a content type follows, which is no part of what stands before it
        if text == _MESSAGE and self._state is not _State.BODY:
            return self._begin()
        if text not in (_START, _CHANNEL, *_ENDS):
            return []
        opening, self._opening = self._opening, ""
        parts = self._close()
        if text == _START:
            self._state, self._header, self._channel = _State.HEADER, "", None
        elif text == _CHANNEL:
            if self._state is _State.BODY:  # a message that begins without its start
                self._header = "assistant"
            self._add(opening)
            self._state, self._channel = _State.HEADER, ""
        else:
            self._state, self._kind = _State.BODY, None
        return parts

    def end(self) -> list[AnswerPart]:
        """Return an opening that became no header, as content."""
        opening, self._opening = self._opening, ""
        return [AnswerPart(PartKind.CONTENT, opening)] if opening else self._close()

    def _open(self, text: str) -> list[AnswerPart]:
        self._opening += text
        if _TO.startswith(self._opening) and self._opening != _TO:
            return []
        begun, self._opening = self._opening, ""
        if begun.startswith(_TO):
            self._state = _State.HEADER
            self._add(begun)
            return []
        self._state, self._kind = _State.BODY, PartKind.CONTENT
        return [AnswerPart(PartKind.CONTENT, begun)]

    def _begin(self) -> list[AnswerPart]:
        self._add(self._opening)
        self._opening, self._state, self._kind = "", _State.BODY, None
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
        """End a message. A call without text has empty arguments."""
        empty, self._empty_call = self._empty_call, False
        return [AnswerPart(PartKind.ARGUMENTS, "{}")] if empty else []

    def _add(self, more: str) -> None:
        if self._channel is None:
            self._header += more[: MAX_HEADER_CHARS + 1 - len(self._header)]
        else:
            self._channel += more[: MAX_HEADER_CHARS + 1 - len(self._channel)]
