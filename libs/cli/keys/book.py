"""The commands of `fulcrum keys`, which edit the store that the suite's services read."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import typer

from libs.cli.console import make_console, plain_table
from libs.cli.find import find_one_suite, find_suite, local_user
from libs.contracts.errors import InvalidRequest, quoted
from libs.contracts.foreign_text import plain
from libs.keys.book import ApiKey, KeyChange, KeySet, KeyStore, Role, TenantLimits, check_tenant, draw_key, shown_key
from libs.keys.store import open_keys
from libs.launch.options import LaunchSettings
from libs.launch.ready import Ready
from libs.runtime.settings import load_settings


def change_book(ready_file: Path | None, edit: Callable[[KeySet], KeySet]) -> KeySet:
    """Store the key book as `edit` returns it. Raise StoreUnavailable."""

    async def change() -> KeySet:
        store = _open(find_one_suite(ready_file))
        try:
            return await store.change(edit)
        finally:
            await store.close()

    return asyncio.run(change())


def change_by(action: str, subject: str, tenant: str, detail: str = "") -> KeyChange:
    """Return the record of a change made now by this machine's user."""
    return KeyChange(time.time_ns(), local_user(), action, subject, tenant, detail)


def load_book(ready_file: Path | None) -> KeySet:
    async def load() -> KeySet:
        store = _open(find_suite(ready_file))
        try:
            found = await store.load()
            assert found is not None
            return found.book
        finally:
            await store.close()

    return asyncio.run(load())


def _open(suite: Ready) -> KeyStore:
    """Open the store of a running suite, or else the one named in the environment."""
    settings = load_settings(LaunchSettings)
    place, redis = suite.keys or settings.keys, suite.redis or settings.redis
    return open_keys(place, redis=redis, cluster=suite.cluster or settings.cluster)


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
    """Make a key, store its hash and print it. Raise InvalidRequest, StoreUnavailable."""
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
    """Revoke a key. Raise KeyNotFound if it does not exist, StoreUnavailable."""
    now_s = time.time()

    def edit(before: KeySet) -> KeySet:
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
    """Return the seconds of a span such as `90m`, `12h`, `30d`. Raise InvalidRequest."""
    found = _TIME.fullmatch(text.strip())
    if not found:
        raise InvalidRequest(f"{option} is {quoted(text)}: it must be a number and s, m, h or d, such as 30d")
    return int(found[1]) * _UNITS_S[found[2]]


def _row(key: Mapping[str, Any]) -> tuple[str, ...]:
    ends_s = key["expires_unix_s"]
    ends = "never" if ends_s is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    models = plain(", ".join(key["models"])) or "all"
    return key["id"], key["tenant"], key["role"], key["status"], key["service_class"], models, ends


def set_limits(
    tenant: str, wanted: Mapping[str, int | None], *, off: bool, ready_file: Path | None, as_json: bool
) -> None:
    """Change the limits that are named, or remove all of them. Raise InvalidRequest, StoreUnavailable."""
    named = {name: value for name, value in wanted.items() if value is not None}
    if off and named:
        raise InvalidRequest("--off removes all limits: do not name others with it")

    def edit(book: KeySet) -> KeySet:
        before = TenantLimits() if off else book.limits.get(tenant, TenantLimits())
        after = book.with_limits(tenant, msgspec.structs.replace(before, **named))
        said = "off" if off else ", ".join(f"{name} {value}" for name, value in named.items())
        return after.noted(change_by("limit", tenant, tenant, said))

    book = change_book(ready_file, edit) if off or named else load_book(ready_file)
    _show({tenant: book.limits.get(tenant, TenantLimits())}, as_json=as_json)


def show_limits(ready_file: Path | None, *, as_json: bool) -> None:
    """Print every tenant that has limits. Raise StoreUnavailable."""
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


def delete_tenant(tenant: str, *, yes: bool, ready_file: Path | None, as_json: bool) -> None:
    """Revoke a tenant's keys, remove its limits and mark all of its data for deletion.

    Raise InvalidRequest, StoreUnavailable.
    """
    check_tenant(tenant)
    if not yes:
        if as_json:
            raise InvalidRequest("--json cannot ask for confirmation: add --yes")
        typer.confirm(f"Delete tenant {tenant}, its keys, files, batches and responses?", abort=True, err=True)
    revoked: list[str] = []

    def edit(before: KeySet) -> KeySet:
        now_ns = time.time_ns()
        revoked[:] = [each.id for each in before.keys if each.tenant == tenant and not each.ended(now_ns / 1e9)]
        return before.without_tenant(tenant, now_ns).noted(
            change_by("delete-tenant", tenant, tenant, f"{len(revoked)} keys revoked")
        )

    book = change_book(ready_file, edit)
    if as_json:
        print(json.dumps({"tenant": tenant, "deleted_unix_ns": book.deleted[tenant], "revoked": revoked}))
        return
    print(f"Tenant {tenant} is deleted, {len(revoked)} keys are revoked, and its files are deleted within a minute.")


def rotate_cache_secret(*, ready_file: Path | None, as_json: bool) -> None:
    change_book(
        ready_file,
        lambda before: before.with_cache_secret(anew=True).noted(change_by("rotate-salt", "cache", "")),
    )
    print(json.dumps({"rotated": True}) if as_json else "Tenants' KV blocks have new salts: caches begin cold.")
