"""The parts of an answer in any model's format, and the port that all formats implement. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from libs.model.tokenizer import Decoder


class PartKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    """The start of a tool call, whose text is the tool's name."""
    ARGUMENTS = auto()
    """A piece of the last call's arguments, a JSON object."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    kind: PartKind
    text: str


class Parser(Protocol):
    """A parser of one answer. Its output joins to the same parts however the text is cut."""

    @property
    def thinking(self) -> bool:
        """Return whether the next token belongs to the reasoning."""
        ...

    @property
    def held(self) -> str:
        """Return the text held back until more of it arrives; it may still become content."""
        ...

    def text(self, text: str) -> list[AnswerPart]: ...

    def special(self, text: str) -> list[AnswerPart]:
        """Parse a special token, given by its text. It is never shown itself."""
        ...

    def end(self) -> list[AnswerPart]:
        """End the answer and return the parts of the text that was held back."""
        ...


class AnswerReader:
    """The reader of one answer. Ordinary tokens become text; special tokens are the format's markers."""

    def __init__(self, parser: Parser, decoder: Decoder, special_tokens: Mapping[int, str]) -> None:
        self._parser = parser
        self._decoder = decoder
        self._special = special_tokens
        self.reasoning_tokens = 0
        self.kept = False
        """Whether later tokens decide if the last token is content."""

    @property
    def held(self) -> str:
        """Return the text held back until more of it arrives; it may still become content."""
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
        """End the answer and return the parts of the text that was held back."""
        return self._flush() + self._parser.end()

    def _flush(self) -> list[AnswerPart]:
        text = self._decoder.flush()
        return self._parser.text(text) if text else []


def is_content(parts: list[AnswerPart]) -> bool:
    """Return whether any of the parts is shown as content."""
    return any(part.kind is PartKind.CONTENT for part in parts)
