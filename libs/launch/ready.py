"""The ready file, from which other commands learn the addresses of a running suite."""

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from libs.contracts.errors import StartupError
from libs.runtime.paths import cache_dir

DEFAULT_GATEWAY_PORT = 8000


class Ready(msgspec.Struct, frozen=True):
    """The addresses and credentials of one running suite."""

    gateway: str
    """The base URL of the first gateway."""
    gateways: tuple[str, ...]
    planner: str
    metrics: str
    pid: int
    """The process id of `fulcrum up`, which stops the suite on SIGTERM."""
    token: str
    """The bearer token of admin routes, a new one for every suite."""
    kafka: str
    redis: str
    cluster: str
    model: str
    engine: str
    keys: str = ""
    """The location of the hashes of API keys: a file, or `redis`."""

    @property
    def gateway_port(self) -> int:
        """The port of the first gateway, after which the suite's own ready file and log folder are named."""
        return urlsplit(self.gateway).port or 0


def default_ready_file(gateway_port: int) -> Path:
    """Return the ready file of the suite on this port."""
    return cache_dir() / "suites" / f"{gateway_port}.json"


def logs_folder(gateway_port: int) -> Path:
    """Return the folder with a log for each process of the suite on this port."""
    return cache_dir() / "logs" / str(gateway_port)


def write_ready(path: Path, ready: Ready) -> None:
    """Write the file atomically, readable only by its owner. Raise StartupError."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(ready) + b"\n")
        part.replace(path)
    except OSError as error:
        raise StartupError(f"the ready file {path} cannot be written ({error.strerror}): name another") from None


def read_ready(path: Path) -> Ready | None:
    """Read the file. Return None if it is missing or invalid, or if its suite no longer runs."""
    try:
        ready = msgspec.json.decode(path.read_bytes(), type=Ready)
    except (OSError, msgspec.MsgspecError):
        return None
    return ready if _alive(ready.pid) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
