"""The launcher port: start and stop the processes of a suite, wherever they run."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from libs.launch.report import StatusLine


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process of a suite."""

    name: str
    """Stable over restarts; for a worker its id."""
    command: tuple[str, ...]
    """"python" in front stands for the interpreter that holds this project."""
    env: Mapping[str, str]
    """Set beside what the launcher itself inherited."""
    ready_text: str = ""
    """For a program without status lines: it is ready once it prints a line with this text."""
    port_variable: str = ""
    """Variable of the HTTP port: a restart keeps the port that the first start got."""


class Child(Protocol):
    """A started process and whatever it started."""

    @property
    def pid(self) -> int:
        """Id of the process itself."""
        ...

    def statuses(self) -> AsyncIterator[StatusLine]:
        """Its status lines, to the end of its output; one consumer."""
        ...

    async def wait(self) -> int:
        """The exit code once it has ended; negative: the signal that ended it."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and after `grace_s` end it and all it started. Returns when nothing is left."""
        ...

    def kill(self) -> None:
        """End it and all it started at once."""
        ...


class Launcher(Protocol):
    """Starts children. They never outlive the launcher's own process."""

    async def start(self, spec: ChildSpec) -> Child:
        """Raises StartupError when it cannot even be started."""
        ...

    def log_of(self, name: str) -> str:
        """The file in which a person finds what the child wrote."""
        ...

    def last_words(self, name: str) -> str:
        """The last line that the child logged; empty when there is none."""
        ...

    async def bound_logs(self) -> None:
        """Cut what children have logged to a bounded size; called now and then while they run."""
        ...
