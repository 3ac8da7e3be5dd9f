"""What a suite reports to its starter, from the status lines of its children (`libs.runtime.status`)."""

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
    """The folder of a model that has been prepared."""
    error: str = ""

    @property
    def address(self) -> str:
        """The address that the child serves on, as people write it."""
        return self.http or self.grpc or self.kafka


_decoder = msgspec.json.Decoder(StatusLine)


def parse_status(line: bytes) -> StatusLine | None:
    """Parse a status line. Returns None for anything else, such as a library's output."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


class Reporter(Protocol):
    """Shows progress; the command line has one for terminals and one for plain output."""

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """Report the fraction (0..1) of a stage of `name` that is done."""
        ...

    def ready(self, name: str, address: str) -> None:
        """Report that `name` serves, at the first start and after each restart."""
        ...

    def note(self, text: str) -> None:
        """Report an event in one line."""
        ...
