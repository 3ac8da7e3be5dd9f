"""The commands `fulcrum keys create`, `list` and `revoke`, which edit the store that the suite's services read."""

import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from libs.cli.console import make_console, plain_table
from libs.cli.keys.store import change_book, change_by, load_book
from libs.contracts.errors import InvalidRequest, quoted
from libs.contracts.foreign_text import plain
from libs.keys.book import ApiKey, KeyBook, Role, draw_key, shown_key

_TIME: Final = re.compile(r"([1-9][0-9]{0,7})([smhd])", re.ASCII)
MAX_DETAIL: Final = 500
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def create_key(
    tenant: str,
    *,
    role: str,
    models: str,
    expires: str | None,
    service_class: str,
    priority: int,
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Make a key, store its hash and print it. Raises InvalidRequest, StoreUnavailable."""
    now_s = time.time()
    secret, key = draw_key(
        tenant,
        now_s=now_s,
        role=cast(Role, role),
        models=tuple(filter(None, (name.strip() for name in models.split(",")))),
        service_class=service_class,
        priority=priority,
        expires_in_s=None if expires is None else span_s(expires),
    )
    made = change_by("create", key.id, tenant, f"role {key.role}, models {', '.join(key.models) or 'all'}"[:MAX_DETAIL])
    book = change_book(ready_file, lambda before: before.with_key(key, now_s).noted(made))
    if as_json:
        print(json.dumps({**shown_key(key, now_s), "key": secret}))
        return
    print(secret)
    said = [f"{key.id} of tenant {key.tenant}, {key.role}: keep it, it is not shown again."]
    if len(book.keys) == 1:
        said.append("It is the first: from now on every request needs a key, `authorization: Bearer KEY`.")
    print("\n".join(said), file=sys.stderr)


def show_keys(ready_file: Path | None, *, as_json: bool) -> None:
    now_s = time.time()
    shown = [shown_key(key, now_s) for key in load_book(ready_file).keys]
    if as_json:
        print(json.dumps(shown))
        return
    if not shown:
        print("There is no key: whoever reaches the suite may use it. `fulcrum keys create` makes one.")
        return
    titles = ("id", "tenant", "role", "status", "class", "models", "expires")
    table = plain_table(*titles, left=titles, wraps=("models",))
    for each in shown:
        table.add_row(*_row(each))
    make_console().print(table)


def revoke_key(key_id: str, *, ready_file: Path | None, as_json: bool) -> None:
    """Revoke a key. Raises KeyNotFound if it does not exist, StoreUnavailable."""
    now_s = time.time()

    def edit(before: KeyBook) -> KeyBook:
        after = before.without_key(key_id, now_s)
        tenant = next(each.tenant for each in after.keys if each.id == key_id)
        return after.noted(change_by("revoke", key_id, tenant))

    book = change_book(ready_file, edit)
    key: ApiKey = next(each for each in book.keys if each.id == key_id)
    if as_json:
        print(json.dumps(shown_key(key, now_s)))
        return
    print(f"{key.id} of tenant {key.tenant} is revoked.")


def span_s(text: str, option: str = "--expires") -> int:
    """Return the seconds of a span such as `90m`, `12h`, `30d`. Raises InvalidRequest."""
    found = _TIME.fullmatch(text.strip())
    if not found:
        raise InvalidRequest(f"{option} is {quoted(text)}: it has to be a number and s, m, h or d, such as 30d")
    return int(found[1]) * _UNITS_S[found[2]]


def _row(key: Mapping[str, Any]) -> tuple[str, ...]:
    ends_s = key["expires_unix_s"]
    ends = "never" if ends_s is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    models = plain(", ".join(key["models"])) or "all"
    return key["id"], key["tenant"], key["role"], key["status"], key["service_class"], models, ends
