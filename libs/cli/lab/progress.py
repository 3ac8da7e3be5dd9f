"""Progress on stderr: a line that is rewritten on a terminal, lines now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.status import Status
from rich.text import Text

from libs.cli.console import make_console

QUIET_S: Final = 2.0
"""Between two lines about what goes on, where stderr is no terminal."""


class Notes(Protocol):
    """What is being done, and what has been."""

    def doing(self, text: str) -> None:
        """Something goes on."""
        ...

    def done(self, text: str) -> None:
        """Something has come to its end."""
        ...


class _Lines:
    def __init__(self) -> None:
        self._shown_s = time.monotonic()

    def doing(self, text: str) -> None:
        if time.monotonic() - self._shown_s >= QUIET_S:
            self.done(text)

    def done(self, text: str) -> None:
        self._shown_s = time.monotonic()
        print(text, file=sys.stderr, flush=True)


class _Spinner:
    def __init__(self, status: Status) -> None:
        self._status = status

    def doing(self, text: str) -> None:
        self._status.update(Text(text))

    def done(self, text: str) -> None:
        self._status.update(Text(text))
        self._status.console.print(text, style="dim")


@contextmanager
def noting() -> Iterator[Notes]:
    """By what stderr is."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with console.status("reading") as status:
        yield _Spinner(status)
