"""How benches print: tables of one style for people, and percentiles of measured values."""

import statistics
from collections.abc import Collection, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from libs.cli.console import plain_table

# Wide enough that no table breaks its rows, whatever the terminal.
WIDTH: Final = 160


def titled_table(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """Return an empty table under a title; columns named in `left` and the first one are aligned left."""
    table = plain_table(*columns, left=(columns[0], *left))
    table.title, table.title_justify = title, "left"
    return table


def show(*tables: Table) -> None:
    """Print tables to stdout, an empty line after each."""
    console = Console(highlight=False, width=WIDTH)
    for table in tables:
        console.print(table)
        console.print()


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]}
