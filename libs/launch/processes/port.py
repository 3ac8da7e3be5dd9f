"""The launcher port: the processes of a suite, on whatever machine, and their status lines (`libs.runtime.status`)."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec


class StatusLine(msgspec.Struct, frozen=True):
    """A line of a child's stdout that reports progress, readiness or failure."""

    event: str
    stage: str = ""
    fraction: float = 0.0
    http: str = ""
    grpc: str = ""
    kafka: str = ""
    path: str = ""
    """The folder of a model that has been prepared; empty for other lines."""
    error: str = ""

    @property
    def address(self) -> str:
        """The address at which the child serves: its HTTP URL, or else its gRPC or Kafka address."""
        return self.http or self.grpc or self.kafka


_decoder = msgspec.json.Decoder(StatusLine)


def parse_status(line: bytes) -> StatusLine | None:
    """Parse a status line. Return None for any other line, such as a library's output."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


class Reporter(Protocol):
    """A display of progress. The command line has one for terminals and one for plain output."""

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """Report the completed fraction (0..1) of a stage of `name`."""
        ...

    def ready(self, name: str, address: str) -> None:
        """Report that `name` serves, at its first start and after each restart."""
        ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The description of one process of a suite."""

    name: str
    """The name, which survives restarts. A worker's name is its id."""
    command: tuple[str, ...]
    """The command. A leading "python" stands for the interpreter with this project."""
    env: Mapping[str, str]
    """The variables that are set in addition to those of the launcher."""
    ready_text: str = ""
    """The text by which a program without status lines reports that it is ready."""
    port_variable: str = ""
    """The variable of the HTTP port. A restart keeps the port of the first start."""


class Child(Protocol):
    """A started process, together with all its descendants."""

    @property
    def pid(self) -> int:
        """The id of the process itself, not of a wrapper."""
        ...

    def statuses(self) -> AsyncIterator[StatusLine]:
        """Yield status lines to the end of the child's output, for one consumer."""
        ...

    async def wait(self) -> int:
        """Wait for the child's end and return its exit code. A negative one is a signal's number."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask the child to end, and after `grace_s` kill it and its descendants. Return when none of them is left."""
        ...

    def kill(self) -> None:
        """Kill the child and all its descendants at once."""
        ...


class Launcher(Protocol):
    """A launcher of children, which never outlive its own process."""

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child. Raise StartupError on failure."""
        ...

    def log_of(self, name: str) -> str:
        """Return the file of the child's log."""
        ...

    def last_words(self, name: str) -> str:
        """Return the last line that the child logged; empty if there is none."""
        ...

    async def bound_logs(self) -> None:
        """Reduce logs to a bounded size. Call it at intervals while children run."""
        ...
