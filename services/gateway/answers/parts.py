"""The parts of an answer in any model's format, and the port that all formats implement. Pure."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class PartKind(Enum):
    """The purpose of an answer's part."""

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

    def text(self, text: str) -> list[AnswerPart]:
        """Parse a piece of ordinary text."""
        ...

    def special(self, text: str) -> list[AnswerPart]:
        """Parse a special token, given by its text. It is never shown itself."""
        ...

    def end(self) -> list[AnswerPart]:
        """End the answer and return the parts of the text that was held back."""
        ...
