"""The consoles and tables of all commands. Text from elsewhere is never interpreted as markup."""

import sys
from collections.abc import Collection, Iterable
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from libs.contracts.foreign_text import plain

# The width of output that does not go to a terminal.
PIPE_COLUMNS: Final = 200


class PlainConsole(Console):
    """A console that takes text literally: no markup, no emoji codes, no escape codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and escape control characters other than rich's own."""
        for each in super().render(renderable, options):
            if each.control is None and not each.text.isprintable():
                yield Segment(plain(each.text, lines=True), each.style)
            else:
                yield each


def make_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console as wide as the terminal, or `PIPE_COLUMNS` without one. Only Text and `style` set styles."""
    console = PlainConsole(
        file=sys.stderr if stderr else None, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap
    )
    if not console.is_terminal and not soft_wrap:
        console.width = PIPE_COLUMNS
    return console


def plain_table(*titles: str, left: Collection[str] = (), wraps: Collection[str] = (), gap: int = 2) -> Table:
    """Return a table without lines whose columns stand `gap` cells apart.

    Columns named in `left` are aligned left, others right; only those named in `wraps` break into lines.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=title not in wraps)
    return table
