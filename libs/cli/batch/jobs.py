"""The commands of `fulcrum batch`, over the gateway's Files and Batch API."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from libs.cli.batch.files import MAX_OUTAGE_S, check_targets, content, fetch, requests_file, upload
from libs.cli.batch.progress import ENDED, Batch, figures, tell, tell_list
from libs.cli.console import make_console
from libs.cli.find import checked, error_text, find_suite, key_headers, no_suite
from libs.contracts.classes import check_endpoint, window_s
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain

DEFAULT_ENDPOINT = "/v1/chat/completions"
TENANT_HEADER = "x-fulcrum-tenant"
POLL_S = 0.2
TIMEOUT_S = 60.0
# The exit code that shells use for Ctrl-C.
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class JobOptions:
    file: Path | None
    # Either a topic or a file is given.
    topic: str | None
    endpoint: str | None
    window: str
    priority: int
    tenant: str | None
    output_topic: str
    error_topic: str

    def body(self, file: Path | None) -> dict[str, Any]:
        """Return the body of POST /v1/batches without the file's id and without options that were not given.

        Raises InvalidRequest if no gateway would accept it.
        """
        said = {
            "input_topic": self.topic,
            "output_topic": self.output_topic,
            "error_topic": self.error_topic,
            "priority": self.priority,
        }
        endpoint = self.endpoint or (_endpoint_of(file) if file else DEFAULT_ENDPOINT)
        check_endpoint(endpoint)
        window_s(self.window)
        return {"endpoint": endpoint, "completion_window": self.window, **{k: v for k, v in said.items() if v}}


def submit_job(
    ready_file: Path | None, asked: JobOptions, *, wait: bool, output: Path | None, errors: Path | None, as_json: bool
) -> None:
    """Upload the lines and begin the job. With `wait`, exit with 1 unless it was completed with an answered line."""
    check_targets(asked.file, output, errors)
    with _gateway(ready_file) as http:
        batch = _create(http, asked)
        if not wait:
            tell(batch, as_json=as_json)
            _hint(f"fulcrum batch status {batch['id']}", "says how far it is")
            return
        # Whoever waits may be gone before the end.
        print(plain(f"{batch['id']}: {batch['status']}"), file=sys.stderr, flush=True)
        started_s = time.monotonic()
        try:
            batch = _wait(http, batch)
        except KeyboardInterrupt:
            _hint(f"fulcrum batch cancel {batch['id']}", "ends the job, which goes on")
            raise typer.Exit(INTERRUPTED) from None
        took_s = time.monotonic() - started_s
        fetch(http, batch["output_file_id"], output)
        fetch(http, batch["error_file_id"], errors)
        tell(batch, took_s, as_json=as_json)
        if batch["error_file_id"] and errors is None:
            _hint(f"fulcrum batch results {batch['id']} --errors FILE", "says what is wrong with lines that failed")
        if batch["status"] != "completed" or not batch["request_counts"]["completed"]:
            raise typer.Exit(1)


def _create(http: httpx.Client, asked: JobOptions) -> Batch:
    headers = {TENANT_HEADER: asked.tenant} if asked.tenant else {}
    if asked.file is None:
        body = asked.body(None)
        _await_jobs(http)
        return checked(http.post("/v1/batches", json=body, headers=headers))
    with requests_file(asked.file) as file:
        body = asked.body(file)
        _await_jobs(http)
        file_id = upload(http, file)
    answer = http.post("/v1/batches", json={**body, "input_file_id": file_id}, headers=headers)
    if answer.is_client_error:
        # Nobody knows of the file. After a fault of the gateway's there may be a job that reads it.
        with suppress(httpx.TransportError):
            http.delete(f"/v1/files/{file_id}")
    return checked(answer)


def _await_jobs(http: httpx.Client) -> None:
    """Wait until the gateway knows which jobs there are.

    Only this question is asked again: a creation that failed may have made a job.
    """
    _ask(http, "GET", "/v1/batches", params={"limit": 1})


def _hint(command: str, does: str) -> None:
    """Print a hint if stderr is a terminal."""
    if sys.stderr.isatty():
        make_console(stderr=True, soft_wrap=True).print(f"`{command}` {does}.", style="dim")


def show_status(ready_file: Path | None, batch_id: str, *, as_json: bool) -> None:
    with _gateway(ready_file) as http:
        tell(_ask(http, "GET", f"/v1/batches/{batch_id}"), as_json=as_json)


def cancel_job(ready_file: Path | None, batch_id: str, *, as_json: bool) -> None:
    with _gateway(ready_file) as http:
        tell(_ask(http, "POST", f"/v1/batches/{batch_id}/cancel"), as_json=as_json)


def show_list(ready_file: Path | None, limit: int, *, as_json: bool) -> None:
    with _gateway(ready_file) as http:
        batches = _ask(http, "GET", "/v1/batches", params={"limit": limit})["data"]
    if as_json:
        print(json.dumps([figures(batch) for batch in batches]))
    else:
        tell_list(batches)


def fetch_results(
    ready_file: Path | None, batch_id: str, *, output: Path | None, errors: Path | None, as_json: bool
) -> None:
    """Fetch the files of an ended job; answers go to stdout if no file is named."""
    check_targets(None, output, errors)
    with _gateway(ready_file) as http:
        batch = _ask(http, "GET", f"/v1/batches/{batch_id}")
        if batch["status"] not in ENDED:
            raise StartupError(f"{batch_id} is {batch['status']}: its files are there once it has ended")
        fetch(http, batch["output_file_id"], output)
        fetch(http, batch["error_file_id"], errors)
        if as_json:
            print(json.dumps(figures(batch)))
        elif output is None and errors is None and batch["output_file_id"]:
            for part in content(http, batch["output_file_id"]):
                sys.stdout.buffer.write(part)
            sys.stdout.flush()
        elif output is None and errors is None:
            tell(batch, as_json=False)


@contextmanager
def _gateway(ready_file: Path | None) -> Iterator[httpx.Client]:
    url = find_suite(ready_file).gateway
    try:
        with httpx.Client(base_url=url, headers=key_headers(url), timeout=TIMEOUT_S, trust_env=False) as http:
            yield http
    except httpx.TransportError:
        raise no_suite(url) from None


def _endpoint_of(file: Path) -> str:
    """Return the url of the first line that has one."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                return str(json.loads(line)["url"])
            except (ValueError, KeyError, TypeError):
                continue
    return DEFAULT_ENDPOINT


def _wait(http: httpx.Client, batch: Batch) -> Batch:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed", style="dim"),
        TimeRemainingColumn(),
    )
    console = make_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(batch["status"], total=None, failed=0)
        while batch["status"] not in ENDED:
            time.sleep(POLL_S)
            batch = _ask(http, "GET", f"/v1/batches/{batch['id']}", survives=True)
            counts = batch["request_counts"]
            bars.update(
                bar,
                description=batch["status"].replace("_", " "),
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
                failed=counts["failed"],
            )
    return batch


def _ask(
    http: httpx.Client, method: str, url: str, params: dict[str, int] | None = None, *, survives: bool = False
) -> Batch:
    """Return the gateway's answer, asking for up to `MAX_OUTAGE_S` while it is starting or has no broker.

    With `survives` it is also asked again while it fails or cannot be reached. Raises StartupError if it refused,
    httpx.TransportError if it could not be reached.
    """
    deadline_s, waits = time.monotonic() + MAX_OUTAGE_S, False
    while True:
        pause_s, over = POLL_S, time.monotonic() > deadline_s
        try:
            answer = http.request(method, url, params=params)
        except httpx.TransportError:
            if over or not survives:
                raise
        else:
            if over or not (answer.status_code == httpx.codes.SERVICE_UNAVAILABLE or (survives and answer.is_error)):
                return checked(answer)
            pause_s = _retry_after_s(answer)
            if not (waits or survives):
                print(
                    f"{plain(error_text(answer))}; asking again for {MAX_OUTAGE_S:.0f} s", file=sys.stderr, flush=True
                )
                waits = True
        time.sleep(min(pause_s, max(deadline_s - time.monotonic(), POLL_S)))


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the gateway's Retry-After, or `POLL_S` without a usable one."""
    try:
        return max(float(answer.headers["retry-after"]), POLL_S)
    except (KeyError, ValueError):
        return POLL_S
