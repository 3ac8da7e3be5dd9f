"""How `fulcrum batch` prints jobs, for people and for programs."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from libs.cli.console import make_console, plain_table
from libs.contracts.foreign_text import plain_values

ENDED = ("completed", "failed", "cancelled", "expired")

Batch = dict[str, Any]


def figures(batch: Batch, took_s: float | None = None) -> dict[str, Any]:
    """Return the JSON form of a job. `took_s`: from submission to end, if that was waited for."""
    counts = batch["request_counts"]
    found = {"id": batch["id"], "status": batch["status"], **counts}
    own = batch.get("fulcrum") or {}
    if batch["status"] in ENDED:
        found |= {name: batch[name] for name in ("output_file_id", "error_file_id")}
    elif own.get("late") is not None:
        found |= {"expected_end_at": own["expected_end_at"], "late": own["late"]}
    if own.get("waits_for"):
        found["waits_for"] = own["waits_for"]
    if reasons := _reasons(batch):
        found["errors"] = reasons
    if took_s is not None:
        answered = counts["completed"] + counts["failed"]
        found["lines_per_s"] = round(answered / took_s, 2) if took_s else None
    return found


def tell(batch: Batch, took_s: float | None = None, *, as_json: bool) -> None:
    found = figures(batch, took_s)
    if as_json:
        print(json.dumps(found))
        return
    found, batch = plain_values(found), plain_values(batch)
    rate = f", {found['lines_per_s']:g} lines/s" if took_s else ""
    counts = f"{found['completed']} of {found['total']} lines completed, {found['failed']} failed"
    print(f"{batch['id']}: {batch['status']}, {counts}{rate}{_outlook(found)}")
    if "waits_for" in found:
        print(f"  waits: {found['waits_for']}", file=sys.stderr)
    for error in _reasons(batch):
        print(f"  {error['code']}: {error['message']}", file=sys.stderr)


def tell_list(batches: Sequence[Batch]) -> None:
    titles = ("job", "status", "lines", "completed", "failed", "created")
    table = plain_table(*titles, left=("job", "status", "created"), gap=1)
    for batch in plain_values(batches):
        counts = batch["request_counts"]
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(batch["created_at"]))
        table.add_row(
            batch["id"], batch["status"], *(str(counts[name]) for name in ("total", "completed", "failed")), created
        )
    console = make_console()
    console.print(table if batches else "There is no job.")


def _reasons(batch: Batch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (batch["errors"] or {}).get("data", [])
    return found


def _outlook(found: dict[str, Any]) -> str:
    """Return when the job is expected to end, if that is predicted."""
    if "late" not in found:
        return ""
    end_at = found["expected_end_at"]
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end_at)) if end_at else "not in sight"
    return f", expected end {end}" + (": later than its window" if found["late"] else "")
