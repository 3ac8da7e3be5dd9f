"""The command `fulcrum status --links`: the speed of KV transfers between workers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.policy.kv_links import SLOW_LINK

LINKS_PATH: Final = "/v1/links"


class Link(msgspec.Struct, frozen=True):
    """One pair of workers in the metrics service's answer."""

    source: str
    target: str
    model: str
    way: str
    transfers: int
    bytes: int
    gb_per_s: float | None
    of_fastest: float | None
    is_floor: bool = False


def show_links(ready_file: Path | None, *, as_json: bool) -> None:
    """Print each pair, the slowest first. Raises StartupError if there is no suite."""
    answer = get_json(find_suite(ready_file).metrics, LINKS_PATH, exact=as_json)
    if as_json:
        print(json.dumps(answer))
        return
    links = msgspec.convert(answer, list[Link])
    make_console().print(links_table(links) if links else "No KV has come from one worker to another yet.")


def links_table(links: Sequence[Link]) -> Table:
    table = Table("from", "to", "way", "transfers", "GB", "GB/s", "of the fastest", box=None)
    for each in links:
        slow = each.of_fastest is not None and each.of_fastest < SLOW_LINK
        table.add_row(
            each.source,
            each.target,
            each.way.replace("_", " "),
            f"{each.transfers:,}",
            f"{each.bytes / 1e9:.2f}",
            "-" if each.gb_per_s is None else f"{'≥ ' if each.is_floor else ''}{each.gb_per_s:.2f}",
            "-" if each.of_fastest is None else f"{each.of_fastest:.0%}",
            style="bold red" if slow else "",
        )
    return table
