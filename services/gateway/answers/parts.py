"""The parts of an answer, the parser interface of all formats, and a parser of tool calls written as JSON objects.

Pure.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from libs.model.tokenizer import Decoder


class PartKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    """The start of a tool call. The part's text is the tool's name."""
    ARGUMENTS = auto()
    """A piece of the JSON arguments of the latest call."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    kind: PartKind
    text: str


class Parser(Protocol):
    """A parser of one answer. The joined output does not depend on how the input is divided."""

    @property
    def thinking(self) -> bool:
        """Return whether the next token belongs to the reasoning."""
        ...

    @property
    def held(self) -> str:
        """The text that is held back until more arrives. It may still become content."""
        ...

    def text(self, text: str) -> list[AnswerPart]: ...

    def special(self, text: str) -> list[AnswerPart]:
        """Handle a special token, given its text. Its text is never part of the output."""
        ...

    def end(self) -> list[AnswerPart]:
        """End the answer and return the parts that were held back."""
        ...


class AnswerReader:
    """A parser of one answer's tokens.

    Ordinary tokens are decoded to text, and special tokens are passed on as markers.
    """

    def __init__(self, parser: Parser, decoder: Decoder, special_tokens: Mapping[int, str]) -> None:
        self._parser = parser
        self._decoder = decoder
        self._special = special_tokens
        self.reasoning_tokens = 0
        self.kept = False
        """True if the last token's text is held back, so that later tokens decide whether it is content."""

    @property
    def held(self) -> str:
        """The text that is held back until more arrives. It may still become content."""
        return self._parser.held

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token(self, token_id: int) -> list[AnswerPart]:
        self.reasoning_tokens += self._parser.thinking
        special = self._special.get(token_id)
        if special is None:
            text = self._decoder.push(token_id)
            parts = self._parser.text(text) if text else []
            self.kept = not text or bool(self._parser.held)
            return parts
        parts = self._flush()
        self.kept = False
        return parts + self._parser.special(special)

    def end(self) -> list[AnswerPart]:
        """End the answer and return the parts that were held back."""
        return self._flush() + self._parser.end()

    def _flush(self) -> list[AnswerPart]:
        text = self._decoder.flush()
        return self._parser.text(text) if text else []


def is_content(parts: list[AnswerPart]) -> bool:
    return any(part.kind is PartKind.CONTENT for part in parts)


_OPEN = re.compile(r"[\s,]*\{")
_KEY = re.compile(r'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)', re.DOTALL)
_CLOSE = re.compile(r"[\s,]*\}")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r'[^\s,{}\[\]"]+(?=[\s,}\]])')
# Llama's models write "parameters".
_ARGUMENTS = ("arguments", "parameters")


class JsonText:
    """A scanner of one JSON object or list, which finds its end."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """Return the number of leading characters of `text` that belong to the value."""
        for place, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return place + 1
            elif char == "<":  # a tag: JSON has none outside strings, so the model broke off
                self.ended = True
                return place
        return len(text)


class _JsonState(Enum):
    OPENING = auto()
    KEY = auto()
    VALUE = auto()
    # Inside an ignored value.
    SKIPPED = auto()
    ARGUMENTS = auto()
    ENDED = auto()


class JsonCall:
    """A parser of one tool call written as a JSON object.

    The model chooses the order of keys, so arguments that precede the name are held back.
    """

    def __init__(self, is_tool: Callable[[str], bool] = lambda _: True) -> None:
        """Create a parser.

        `is_tool` returns whether a tool has this name. An object without such a name is not a call.
        """
        self.named = False
        """True once the name has been returned, after which the object is certainly a call."""
        self.raw = ""
        """All text so far, until the name is known.

        If the object turns out not to be a call, the caller can return it.
        """
        self._is_tool = is_tool
        self._state = _JsonState.OPENING
        self._left = ""
        self._key = ""
        self._value = JsonText()
        self._early = ""
        self._has_arguments = False

    @property
    def ended(self) -> bool:
        """Return whether the object is complete or cannot be a call."""
        return self._state is _JsonState.ENDED

    def push(self, text: str) -> list[AnswerPart]:
        """Return the parts that `text` adds. After the end of the call, `rest` is the text that follows."""
        if not self.named:
            self.raw += text
        self._left += text
        parts: list[AnswerPart] = []
        while not self.ended and self._step(parts):
            pass
        if self.ended and not self.named:
            self.raw = self.raw[: len(self.raw) - len(self._left)]
        return parts

    @property
    def rest(self) -> str:
        return self._left

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Parse one syntactic element. Return False if more text is needed."""
        if self._state is _JsonState.OPENING:
            return self._take(_OPEN, _JsonState.KEY, "{")
        if self._state is _JsonState.KEY:
            return self._take_key(parts)
        if self._state is _JsonState.VALUE:
            return self._take_value(parts)
        size = self._value.push(self._left)
        value, self._left = self._left[:size], self._left[size:]
        if self._state is _JsonState.ARGUMENTS and value:
            self._argue(value, parts)
        if self._value.ended:
            self._state = _JsonState.KEY
        return self._value.ended

    def _take(self, pattern: re.Pattern[str], state: _JsonState, begins: str) -> bool:
        found = pattern.match(self._left)
        if found:
            self._left, self._state = self._left[found.end() :], state
        elif self._left.lstrip(" \t\r\n,")[:1] not in begins:
            self._state = _JsonState.ENDED
        return found is not None

    def _take_key(self, parts: list[AnswerPart]) -> bool:
        if self._take(_CLOSE, _JsonState.ENDED, '}"'):
            if self.named and not self._has_arguments:
                self._argue("{}", parts)
            return True
        found = _KEY.match(self._left)
        if found:
            self._key, self._left, self._state = found[1], self._left[found.end() :], _JsonState.VALUE
        return found is not None

    def _take_value(self, parts: list[AnswerPart]) -> bool:
        if self._left[0] in "{[":
            self._value = JsonText()
            is_argument = self._key in _ARGUMENTS and self._left[0] == "{" and not self._has_arguments
            self._state = _JsonState.ARGUMENTS if is_argument else _JsonState.SKIPPED
            return True
        found = (_STRING if self._left[0] == '"' else _SCALAR).match(self._left)
        if not found:
            return False
        self._left, self._state = self._left[found.end() :], _JsonState.KEY
        if self._key == "name" and not self.named:
            self._name(found[0], parts)
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._argue(_unquoted(found[0]) or "{}", parts)
        return True

    def _name(self, value: str, parts: list[AnswerPart]) -> None:
        name = _unquoted(value)
        if not name or not self._is_tool(name):
            self._state = _JsonState.ENDED
            return
        self.named, self.raw = True, ""
        parts.append(AnswerPart(PartKind.CALL, name))
        if self._early:
            parts.append(AnswerPart(PartKind.ARGUMENTS, self._early))

    def _argue(self, text: str, parts: list[AnswerPart]) -> None:
        self._has_arguments = True
        if self.named:
            parts.append(AnswerPart(PartKind.ARGUMENTS, text))
        else:
            self._early += text


def _unquoted(value: str) -> str:
    """Return the value of a JSON string, or an empty string for any other or malformed value."""
    try:
        found = json.loads(value)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""
