"""What a suite reports to whoever starts it, from the status lines of its children (`libs.runtime.status`)."""

from typing import Protocol

import msgspec


class StatusLine(msgspec.Struct, frozen=True):
    """One line of a child's stdout: progress, ready, or failed."""

    event: str
    stage: str = ""
    fraction: float = 0.0
    http: str = ""
    grpc: str = ""
    kafka: str = ""
    path: str = ""
    """Folder of a model that was made ready."""
    error: str = ""

    @property
    def address(self) -> str:
        """The address that the child serves on, as people write it."""
        return self.http or self.grpc or self.kafka


_decoder = msgspec.json.Decoder(StatusLine)


def parse_status(line: bytes) -> StatusLine | None:
    """None for a line that is something else: a library that prints, say."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


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
