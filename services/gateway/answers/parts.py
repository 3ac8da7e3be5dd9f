"""What an answer consists of, whatever format its model writes, and the port that all formats are behind. Pure."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class PartKind(Enum):
    """What a part of an answer is for."""

    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    """A tool is called: the text is its name."""
    ARGUMENTS = auto()
    """A piece of the last call's arguments, a JSON object."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer."""

    kind: PartKind
    text: str


class Parser(Protocol):
    """One answer, part by part. What comes out joins to the same parts wherever the text is cut."""

    @property
    def thinking(self) -> bool:
        """Whether the next token is one of the reasoning."""
        ...

    @property
    def held(self) -> str:
        """Text that waits until more of it says what it is; it may still become content."""
        ...

    def text(self, text: str) -> list[AnswerPart]:
        """Ordinary text."""
        ...

    def special(self, text: str) -> list[AnswerPart]:
        """A special token, by its text: never part of what is shown."""
        ...

    def end(self) -> list[AnswerPart]:
        """No more comes: what was held back."""
        ...
