"""What a suite tells the person who starts it."""

from typing import Protocol


class Reporter(Protocol):
    """Shows how far things are; the command line has one for terminals and one for plain output."""

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """How much of a stage of `name` is done, 0..1."""
        ...

    def ready(self, name: str, address: str) -> None:
        """`name` serves; at the first start and after each restart."""
        ...

    def note(self, text: str) -> None:
        """One line about something that happened."""
        ...
