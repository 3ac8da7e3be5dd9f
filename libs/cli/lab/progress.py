"""Progress on stderr: one rewritten line on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.status import Status
from rich.text import Text

from libs.cli.console import make_console

# The pause between two progress lines if stderr is no terminal.
QUIET_S: Final = 2.0


class Notes(Protocol):
    """A display of what is being done and what has been done."""

    def doing(self, text: str) -> None: ...

    def done(self, text: str) -> None: ...


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
    """Yield the display that suits stderr, and clear it at the end."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with console.status("reading") as status:
        yield _Spinner(status)
