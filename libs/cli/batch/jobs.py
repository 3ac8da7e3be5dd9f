"""The commands of `fulcrum batch`, over the gateway's Files and Batch API, and the progress of jobs."""

import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, BinaryIO

import httpx
import rich.progress
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from libs.cli.console import make_console, plain_table
from libs.cli.find import checked, error_text, find_suite, key_headers, no_suite
from libs.contracts.classes import check_endpoint, window_s
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain, plain_values

STDIN = Path("-")
STDIN_NAME = "stdin.jsonl"
# The longest time for which a download may receive no byte while its gateway is away.
MAX_OUTAGE_S = 60.0
RETRY_S = 0.2


def check_targets(options: Path | None, output: Path | None, errors: Path | None) -> None:
    """Raise StartupError if a file cannot be written or would overwrite another. Called before anything is sent."""
    for path in (output, errors):
        if path is not None and not path.parent.is_dir():
            raise StartupError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise StartupError(f"{path} cannot be written: it is a folder")
    if _same(output, errors):
        raise StartupError("--output and --errors name the same file, so one would overwrite the other")
    for option, path in (("--output", output), ("--errors", errors)):
        if _same(options, path):
            raise StartupError(f"{option} names the file of requests, which would be overwritten")


def _same(one: Path | None, other: Path | None) -> bool:
    """Return whether two paths name one regular file. A device such as /dev/null may be named twice."""
    if one is None or other is None or (one.exists() and not one.is_file()):
        return False
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


@contextmanager
def requests_file(file: Path) -> Iterator[Path]:
    """Yield the file itself, or a copy of stdin or of a pipe, because it is read more than once."""
    if file.is_file() and file != STDIN:
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
        copy = Path(folder) / STDIN_NAME
        with sys.stdin.buffer if file == STDIN else file.open("rb") as lines, copy.open("wb") as copied:
            shutil.copyfileobj(lines, copied)
        yield copy


def upload(http: httpx.Client, file: Path) -> str:
    """Upload a file and return the id that the gateway gives it."""
    console = make_console(stderr=True)
    opened = (
        rich.progress.open(file, "rb", description="uploading", console=console, transient=True)
        if console.is_terminal
        else file.open("rb")
    )
    with opened as content:
        form = {"purpose": "batch"}
        return str(checked(http.post("/v1/files", data=form, files={"file": (file.name, content)}))["id"])


def fetch(http: httpx.Client, file_id: str | None, path: Path | None) -> None:
    """Download a file to `path`, which appears once it is complete; an empty one if there is nothing to fetch.

    Restart from the first byte if the gateway went away. Raise StartupError, or httpx.TransportError after a long
    outage.
    """
    if path is None:
        return
    try:
        with _whole(path) as file:
            _download(http, file_id, file)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` once it is complete. A device is written directly."""
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            yield file
        if target.exists():
            part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _download(http: httpx.Client, file_id: str | None, file: BinaryIO) -> None:
    deadline_s, furthest = monotonic() + MAX_OUTAGE_S, 0
    while file_id:
        try:
            got = 0
            for part in content(http, file_id):
                file.write(part)
                got += len(part)
                if got > furthest:
                    deadline_s, furthest = monotonic() + MAX_OUTAGE_S, got
        except httpx.TransportError:
            if monotonic() > deadline_s or not file.seekable():
                raise
            sleep(RETRY_S)
            file.seek(0)
            with suppress(OSError):  # a device has no length
                file.truncate()
        else:
            return


def content(http: httpx.Client, file_id: str) -> Iterator[bytes]:
    """Yield the content of one of the gateway's files, part by part."""
    with http.stream("GET", f"/v1/files/{file_id}/content") as answer:
        if not answer.is_success:
            answer.read()
            raise StartupError(f"the gateway refused: {error_text(answer)}")
        yield from answer.iter_bytes()


ENDED = ("completed", "failed", "cancelled", "expired")

Batch = dict[str, Any]


def figures(batch: Batch, took_s: float | None = None) -> dict[str, Any]:
    """Return the JSON form of a job. `took_s` is the time from submission to end, if the caller waited."""
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


def print_batch(batch: Batch, took_s: float | None = None, *, as_json: bool) -> None:
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


def print_batches(batches: Sequence[Batch]) -> None:
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

        Raise InvalidRequest if no gateway would accept it.
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
    ready_file: Path | None, options: JobOptions, *, wait: bool, output: Path | None, errors: Path | None, as_json: bool
) -> None:
    """Upload the lines and begin the job. With `wait`, exit with 1 unless it was completed with an answered line."""
    check_targets(options.file, output, errors)
    with _gateway(ready_file) as http:
        batch = _create(http, options)
        if not wait:
            print_batch(batch, as_json=as_json)
            _hint(f"fulcrum batch status {batch['id']}", "says how far it is")
            return
        # The waiting command may end before the job does.
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
        print_batch(batch, took_s, as_json=as_json)
        if batch["error_file_id"] and errors is None:
            _hint(f"fulcrum batch results {batch['id']} --errors FILE", "says what is wrong with lines that failed")
        if batch["status"] != "completed" or not batch["request_counts"]["completed"]:
            raise typer.Exit(1)


def _create(http: httpx.Client, options: JobOptions) -> Batch:
    headers = {TENANT_HEADER: options.tenant} if options.tenant else {}
    if options.file is None:
        body = options.body(None)
        _await_jobs(http)
        return checked(http.post("/v1/batches", json=body, headers=headers))
    with requests_file(options.file) as file:
        body = options.body(file)
        _await_jobs(http)
        file_id = upload(http, file)
    answer = http.post("/v1/batches", json={**body, "input_file_id": file_id}, headers=headers)
    if answer.is_client_error:
        # Nothing refers to the file. After a fault of the gateway's, a job that reads it may exist.
        with suppress(httpx.TransportError):
            http.delete(f"/v1/files/{file_id}")
    return checked(answer)


def _await_jobs(http: httpx.Client) -> None:
    """Wait until the gateway knows all jobs.

    Only this query is retried, because a failed creation may have made a job.
    """
    _ask(http, "GET", "/v1/batches", params={"limit": 1})


def _hint(command: str, does: str) -> None:
    """Print a hint if stderr is a terminal."""
    if sys.stderr.isatty():
        make_console(stderr=True, soft_wrap=True).print(f"`{command}` {does}.", style="dim")


def show_status(ready_file: Path | None, batch_id: str, *, as_json: bool) -> None:
    with _gateway(ready_file) as http:
        print_batch(_ask(http, "GET", f"/v1/batches/{batch_id}"), as_json=as_json)


def cancel_job(ready_file: Path | None, batch_id: str, *, as_json: bool) -> None:
    with _gateway(ready_file) as http:
        print_batch(_ask(http, "POST", f"/v1/batches/{batch_id}/cancel"), as_json=as_json)


def show_list(ready_file: Path | None, limit: int, *, as_json: bool) -> None:
    with _gateway(ready_file) as http:
        batches = _ask(http, "GET", "/v1/batches", params={"limit": limit})["data"]
    if as_json:
        print(json.dumps([figures(batch) for batch in batches]))
    else:
        print_batches(batches)


def fetch_results(
    ready_file: Path | None, batch_id: str, *, output: Path | None, errors: Path | None, as_json: bool
) -> None:
    """Fetch the files of an ended job; answers go to stdout if no file is named."""
    check_targets(None, output, errors)
    with _gateway(ready_file) as http:
        batch = _ask(http, "GET", f"/v1/batches/{batch_id}")
        if batch["status"] not in ENDED:
            raise StartupError(f"{batch_id} is {batch['status']}: its files are available once it has ended")
        fetch(http, batch["output_file_id"], output)
        fetch(http, batch["error_file_id"], errors)
        if as_json:
            print(json.dumps(figures(batch)))
        elif output is None and errors is None and batch["output_file_id"]:
            for part in content(http, batch["output_file_id"]):
                sys.stdout.buffer.write(part)
            sys.stdout.flush()
        elif output is None and errors is None:
            print_batch(batch, as_json=False)


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
    """Return the gateway's answer, retrying for up to `MAX_OUTAGE_S` while it is starting or has no broker.

    With `survives`, also retry while it fails or cannot be reached. Raise StartupError if it refused,
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
