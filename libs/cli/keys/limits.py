"""The command `fulcrum keys limits`, which shows and sets the limits of tenants."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from libs.cli.console import make_console, plain_table
from libs.cli.keys.store import change_book, change_by, load_book
from libs.contracts.errors import InvalidRequest
from libs.keys.book import KeyBook, TenantLimits


def set_limits(
    tenant: str, wanted: Mapping[str, int | None], *, off: bool, ready_file: Path | None, as_json: bool
) -> None:
    """Change the limits that are named, or remove all of them. Raises InvalidRequest, StoreUnavailable."""
    named = {name: value for name, value in wanted.items() if value is not None}
    if off and named:
        raise InvalidRequest("--off removes all limits: name none beside it")

    def edit(book: KeyBook) -> KeyBook:
        before = TenantLimits() if off else book.limits.get(tenant, TenantLimits())
        after = book.with_limits(tenant, msgspec.structs.replace(before, **named))
        said = "off" if off else ", ".join(f"{name} {value}" for name, value in named.items())
        return after.noted(change_by("limit", tenant, tenant, said))

    book = change_book(ready_file, edit) if off or named else load_book(ready_file)
    _show({tenant: book.limits.get(tenant, TenantLimits())}, as_json=as_json)


def show_limits(ready_file: Path | None, *, as_json: bool) -> None:
    """Print every tenant that has limits. Raises StoreUnavailable."""
    _show(load_book(ready_file).limits, as_json=as_json)


def _show(limits: Mapping[str, TenantLimits], *, as_json: bool) -> None:
    found = {tenant: msgspec.structs.asdict(each) for tenant, each in sorted(limits.items())}
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print("No tenant has limits: `fulcrum keys limits TENANT --requests 600` sets some.")
        return
    titles = (
        "requests/min",
        "tokens/min",
        "at once",
        "GPU s/day",
        "bytes",
        "file days",
        "batch lines",
        "weight",
        "files",
    )
    table = plain_table("tenant", *titles, left=("tenant",))
    for tenant, each in found.items():
        table.add_row(tenant, *("–" if value is None else str(value) for value in each.values()))
    make_console().print(table)
