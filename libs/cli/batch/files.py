"""The files that `fulcrum batch` uploads and those it writes answers to."""

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import BinaryIO

import httpx
import rich.progress

from libs.cli.console import make_console
from libs.cli.find import checked, error_text
from libs.contracts.errors import StartupError

STDIN = Path("-")
STDIN_NAME = "stdin.jsonl"
# How long a download may go without a new byte while its gateway is away.
MAX_OUTAGE_S = 60.0
RETRY_S = 0.2


def check_targets(asked: Path | None, output: Path | None, errors: Path | None) -> None:
    """Raise StartupError if a file cannot be written or would overwrite another. Called before anything is sent."""
    for path in (output, errors):
        if path is not None and not path.parent.is_dir():
            raise StartupError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise StartupError(f"{path} cannot be written: it is a folder")
    if _same(output, errors):
        raise StartupError("--output and --errors name the same file, of which one would write over the other")
    for option, path in (("--output", output), ("--errors", errors)):
        if _same(asked, path):
            raise StartupError(f"{option} names the file of requests, which would be written over")


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
    """Download a file to `path`, which appears once it is whole; an empty one if there is nothing to fetch.

    Starts again from the first byte if the gateway went away. Raises StartupError, or httpx.TransportError after a
    long outage.
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
    """Yield a temporary file that replaces `path` once it is whole. A device is written as it is."""
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
