"""One line of progress on stderr: rewritten on a terminal, now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

from libs.lab.study import Note

QUIET_S: Final = 2.0
"""Between two lines where stderr is no terminal."""


@contextmanager
def noting() -> Iterator[Note]:
    """Call the result with what is being done."""
    console = Console(file=sys.stderr, highlight=False)
    if console.is_terminal:
        with console.status("reading") as status:
            yield status.update
        return
    shown_s = time.monotonic()

    def line(text: str) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= QUIET_S:
            shown_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield line
