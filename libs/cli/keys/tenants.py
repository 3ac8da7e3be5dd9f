"""The commands `fulcrum keys delete-tenant` and `fulcrum keys rotate-salt`."""

import json
import time
from pathlib import Path

import typer

from libs.cli.keys.store import change_book, change_by
from libs.contracts.errors import InvalidRequest
from libs.keys.book import KeyBook, check_tenant


def delete_tenant(tenant: str, *, yes: bool, ready_file: Path | None, as_json: bool) -> None:
    """Revoke a tenant's keys, remove its limits and mark all of its data for deletion.

    Raises InvalidRequest, StoreUnavailable.
    """
    check_tenant(tenant)
    if not yes:
        if as_json:
            raise InvalidRequest("--json asks nobody: say --yes too")
        typer.confirm(f"Delete tenant {tenant}, its keys, files, batches and responses?", abort=True, err=True)
    revoked: list[str] = []

    def edit(before: KeyBook) -> KeyBook:
        now_ns = time.time_ns()
        revoked[:] = [each.id for each in before.keys if each.tenant == tenant and not each.ended(now_ns / 1e9)]
        return before.without_tenant(tenant, now_ns).noted(
            change_by("delete-tenant", tenant, tenant, f"{len(revoked)} keys revoked")
        )

    book = change_book(ready_file, edit)
    if as_json:
        print(json.dumps({"tenant": tenant, "deleted_unix_ns": book.deleted[tenant], "revoked": revoked}))
        return
    print(f"Tenant {tenant} is deleted, {len(revoked)} keys are revoked: its files go within a minute.")


def rotate_cache_secret(*, ready_file: Path | None, as_json: bool) -> None:
    change_book(
        ready_file,
        lambda before: before.with_cache_secret(anew=True).noted(change_by("rotate-salt", "cache", "")),
    )
    print(json.dumps({"rotated": True}) if as_json else "Tenants' KV blocks have new salts: caches begin cold.")
