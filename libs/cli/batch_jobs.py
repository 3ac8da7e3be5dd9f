"""What `fulcrum batch` does, over the gateway's Files and Batch API."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import rich.progress
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from libs.cli.find import error_text, find_suite, no_suite
from libs.contracts.errors import StartupError

ENDED = ("completed", "failed", "cancelled", "expired")
DEFAULT_ENDPOINT = "/v1/chat/completions"
TENANT_HEADER = "x-fulcrum-tenant"
POLL_S = 0.2
TIMEOUT_S = 60.0
MAX_OUTAGE_S = 60.0
"""How long a gateway may be away while one waits: the job does not need it."""
PIPE_COLUMNS = 160
INTERRUPTED = 130
"""Exit code, as shells have it for Ctrl-C."""

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A job as the command line has it."""

    file: Path | None
    topic: str | None
    """One of the two is there."""
    endpoint: str | None
    window: str
    priority: int
    tenant: str | None
    output_topic: str
    error_topic: str

    def body(self, file_id: str) -> dict[str, Any]:
        """What POST /v1/batches is sent, without what is not said."""
        said = {
            "input_file_id": file_id,
            "input_topic": self.topic,
            "output_topic": self.output_topic,
            "error_topic": self.error_topic,
            "priority": self.priority,
        }
        endpoint = self.endpoint or (_endpoint_of(self.file) if self.file else DEFAULT_ENDPOINT)
        return {"endpoint": endpoint, "completion_window": self.window, **{k: v for k, v in said.items() if v}}


def submit_job(
    ready_file: Path | None, asked: Asked, *, wait: bool, output: Path | None, errors: Path | None, as_json: bool
) -> None:
    """Upload and begin; with `wait` until the end, which leaves with exit code 1 unless the job was completed."""
    _check_targets(output, errors)
    with _gateway(ready_file) as http:
        file_id = _upload(http, asked.file) if asked.file else ""
        headers = {TENANT_HEADER: asked.tenant} if asked.tenant else {}
        batch = _checked(http.post("/v1/batches", json=asked.body(file_id), headers=headers))
        started_s = time.monotonic()
        if not wait:
            _tell(batch, None, as_json=as_json)
            _hint(f"fulcrum batch status {batch['id']}", "says how far it is")
            return
        try:
            batch = _wait(http, batch)
        except KeyboardInterrupt:
            _hint(f"fulcrum batch cancel {batch['id']}", "ends the job, which goes on")
            raise typer.Exit(INTERRUPTED) from None
        _fetch(http, batch["output_file_id"], output)
        _fetch(http, batch["error_file_id"], errors)
        _tell(batch, time.monotonic() - started_s, as_json=as_json)
        if batch["error_file_id"] and errors is None:
            _hint(f"fulcrum batch results {batch['id']} --errors FILE", "says what is wrong with lines that failed")
        if batch["status"] != "completed":
            raise typer.Exit(1)


def _check_targets(*paths: Path | None) -> None:
    """Before the job runs rather than at its end; raises StartupError."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise StartupError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise StartupError(f"{path} cannot be written: it is a folder")


def _hint(command: str, does: str) -> None:
    """For a person at a terminal."""
    if sys.stderr.isatty():
        Console(file=sys.stderr, highlight=False, soft_wrap=True).print(f"[dim]`{command}` {does}.[/]")


def _upload(http: httpx.Client, file: Path) -> str:
    console = Console(file=sys.stderr, highlight=False)
    opened = (
        rich.progress.open(file, "rb", description="uploading", console=console, transient=True)
        if console.is_terminal
        else file.open("rb")
    )
    with opened as content:
        form = {"purpose": "batch"}
        return str(_checked(http.post("/v1/files", data=form, files={"file": (file.name, content)}))["id"])


def show_status(ready_file: Path | None, batch_id: str, *, as_json: bool) -> None:
    """Print one job."""
    with _gateway(ready_file) as http:
        _tell(_checked(http.get(f"/v1/batches/{batch_id}")), None, as_json=as_json)


def cancel_job(ready_file: Path | None, batch_id: str, *, as_json: bool) -> None:
    """Cancel one."""
    with _gateway(ready_file) as http:
        _tell(_checked(http.post(f"/v1/batches/{batch_id}/cancel")), None, as_json=as_json)


def show_list(ready_file: Path | None, limit: int, *, as_json: bool) -> None:
    """Print the youngest jobs."""
    with _gateway(ready_file) as http:
        batches = _checked(http.get("/v1/batches", params={"limit": limit}))["data"]
    if as_json:
        print(json.dumps([_figures(batch, None) for batch in batches]))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in ("job", "status", "lines", "completed", "failed", "created"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("lines", "completed", "failed") else "left")
    for batch in batches:
        counts = batch["request_counts"]
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(batch["created_at"]))
        table.add_row(
            batch["id"], batch["status"], *(str(counts[name]) for name in ("total", "completed", "failed")), created
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    console.print(table if batches else "There is no job.")


def fetch_results(
    ready_file: Path | None, batch_id: str, *, output: Path | None, errors: Path | None, as_json: bool
) -> None:
    """Fetch the files of an ended job; answers go to stdout where no file is named."""
    _check_targets(output, errors)
    with _gateway(ready_file) as http:
        batch = _checked(http.get(f"/v1/batches/{batch_id}"))
        if batch["status"] not in ENDED:
            raise StartupError(f"{batch_id} is {batch['status']}: its files are there once it has ended")
        _fetch(http, batch["output_file_id"], output)
        _fetch(http, batch["error_file_id"], errors)
        if as_json:
            print(json.dumps(_figures(batch, None)))
        elif output is None and errors is None and batch["output_file_id"]:
            for part in _content(http, batch["output_file_id"]):
                sys.stdout.buffer.write(part)
            sys.stdout.flush()
        elif output is None and errors is None:
            _tell(batch, None, as_json=False)


@contextmanager
def _gateway(ready_file: Path | None) -> Iterator[httpx.Client]:
    url = find_suite(ready_file).gateway
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
            yield http
    except httpx.TransportError:
        raise no_suite(url) from None


def _checked(answer: httpx.Response) -> Batch:
    if not answer.is_success:
        raise StartupError(f"the gateway refused: {error_text(answer)}")
    found: Batch = answer.json()
    return found


def _endpoint_of(file: Path) -> str:
    """The url of the first line that has one."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                return str(json.loads(line)["url"])
            except (ValueError, KeyError, TypeError):
                continue
    return DEFAULT_ENDPOINT


def _wait(http: httpx.Client, batch: Batch) -> Batch:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed", style="dim"),
        TimeRemainingColumn(),
    )
    console = Console(file=sys.stderr, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(batch["status"], total=None, failed=0)
        while batch["status"] not in ENDED:
            time.sleep(POLL_S)
            batch = _ask_again(http, batch["id"])
            counts = batch["request_counts"]
            bars.update(
                bar,
                description=batch["status"].replace("_", " "),
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
                failed=counts["failed"],
            )
    return batch


def _ask_again(http: httpx.Client, batch_id: str) -> Batch:
    """How the job is now, also when its gateway was away for a moment."""
    deadline_s = time.monotonic() + MAX_OUTAGE_S
    while True:
        try:
            answer = http.get(f"/v1/batches/{batch_id}")
            if answer.is_success or time.monotonic() > deadline_s:
                return _checked(answer)
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_S)


def _fetch(http: httpx.Client, file_id: str | None, path: Path | None) -> None:
    """Into the file, from its start where the gateway went away; an empty one where there is nothing to fetch."""
    deadline_s = time.monotonic() + MAX_OUTAGE_S
    while path is not None:
        try:
            with path.open("wb") as file:
                for part in _content(http, file_id) if file_id else ():
                    file.write(part)
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)
        except OSError as error:
            raise StartupError(f"{path} cannot be written: {error.strerror}") from error
        else:
            return


def _content(http: httpx.Client, file_id: str) -> Iterator[bytes]:
    with http.stream("GET", f"/v1/files/{file_id}/content") as answer:
        if not answer.is_success:
            answer.read()
            raise StartupError(f"the gateway refused: {error_text(answer)}")
        yield from answer.iter_bytes()


def _figures(batch: Batch, took_s: float | None) -> dict[str, Any]:
    counts = batch["request_counts"]
    figures = {"id": batch["id"], "status": batch["status"], **counts}
    own = batch.get("fulcrum") or {}
    if own.get("late") is not None and batch["status"] not in ENDED:
        figures |= {"expected_end_at": own["expected_end_at"], "late": own["late"]}
    if took_s is not None:
        answered = counts["completed"] + counts["failed"]
        figures["lines_per_s"] = round(answered / took_s, 2) if took_s else None
    return figures


def _tell(batch: Batch, took_s: float | None, *, as_json: bool) -> None:
    figures = _figures(batch, took_s)
    if as_json:
        print(json.dumps(figures))
        return
    rate = f", {figures['lines_per_s']:g} lines/s" if took_s else ""
    counts = f"{figures['completed']} of {figures['total']} lines completed, {figures['failed']} failed"
    print(f"{batch['id']}: {batch['status']}, {counts}{rate}{_outlook(figures)}")
    for error in (batch["errors"] or {}).get("data", ()):
        print(f"  {error['code']}: {error['message']}", file=sys.stderr)


def _outlook(figures: dict[str, Any]) -> str:
    """When the job is expected to end, where that is foretold."""
    if "late" not in figures:
        return ""
    end_at = figures["expected_end_at"]
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end_at)) if end_at else "not in sight"
    return f", expected end {end}" + (": later than its window" if figures["late"] else "")
