"""The launcher port: processes of a suite, wherever they run, and their reports (`libs.runtime.status`)."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
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
        """The address on which the child serves: its HTTP URL, or else its gRPC or Kafka address."""
        return self.http or self.grpc or self.kafka


_decoder = msgspec.json.Decoder(StatusLine)


def parse_status(line: bytes) -> StatusLine | None:
    """Parse a status line. Return None for anything else, such as a library's output."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


class Reporter(Protocol):
    """A display of progress; the command line has one for terminals and one for plain output."""

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """Report the fraction (0..1) of a stage of `name` that is done."""
        ...

    def ready(self, name: str, address: str) -> None:
        """Report that `name` serves, at the first start and after each restart."""
        ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process of a suite to be started."""

    name: str
    """A name that survives restarts; for a worker its id."""
    command: tuple[str, ...]
    """The command; a leading "python" means the interpreter with this project."""
    env: Mapping[str, str]
    """Variables set in addition to those that the launcher inherited."""
    ready_text: str = ""
    """The text of the line that marks a program without status lines as ready."""
    port_variable: str = ""
    """The variable of the HTTP port. A restart keeps the port of the first start."""


class Child(Protocol):
    """A started process together with everything it started."""

    @property
    def pid(self) -> int:
        """Return the id of the process itself, not that of a wrapper."""
        ...

    def statuses(self) -> AsyncIterator[StatusLine]:
        """Yield its status lines to the end of its output, for one consumer."""
        ...

    async def wait(self) -> int:
        """Wait for its end and return the exit code; a negative one is a signal's number."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Request the child's end, and after `grace_s` kill it and all its descendants. Return when nothing is left."""
        ...

    def kill(self) -> None:
        """Kill the child and all its descendants at once."""
        ...


class Launcher(Protocol):
    """A starter of children, which never outlive the launcher's own process."""

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child. Raise StartupError if that is impossible."""
        ...

    def log_of(self, name: str) -> str:
        """Return the file with the child's log."""
        ...

    def last_words(self, name: str) -> str:
        """Return the last line that the child logged; empty if there is none."""
        ...

    async def bound_logs(self) -> None:
        """Cut logs to a bounded size; called now and then while children run."""
        ...
