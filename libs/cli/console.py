"""How commands print: as wide as the terminal, and tables without lines."""

from collections.abc import Collection
from typing import Final

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS: Final = 200
"""Where there is no terminal to fit into."""


def make_console() -> Console:
    """As wide as the terminal, and `PIPE_COLUMNS` where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def plain_table(*titles: str, left: Collection[str] = (), wraps: Collection[str] = (), gap: int = 2) -> Table:
    """Columns `gap` cells apart; those named in `left` begin at the left, others end at the right, and only those named
    in `wraps` break into lines."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=title not in wraps)
    return table
