"""The ready file: where a running suite is. Other commands find it by name or by the gateway's port."""

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from libs.contracts.errors import StartupError
from libs.runtime.paths import cache_dir

DEFAULT_GATEWAY_PORT = 8000


class Ready(msgspec.Struct, frozen=True):
    """One running suite."""

    gateway: str
    """Base URL of the first gateway."""
    gateways: tuple[str, ...]
    planner: str
    metrics: str
    pid: int
    """Process id of `fulcrum up`."""
    token: str
    """Bearer token of admin verbs; new with every suite."""
    kafka: str
    redis: str
    cluster: str
    model: str
    engine: str
    keys: str = ""
    """Where hashes of API keys are: a file, or `redis`."""

    @property
    def gateway_port(self) -> int:
        """Port of the first gateway: it names the suite's own ready file and the folder of its logs."""
        return urlsplit(self.gateway).port or 0


def default_ready_file(gateway_port: int) -> Path:
    """Written by every suite."""
    return cache_dir() / "suites" / f"{gateway_port}.json"


def logs_folder(gateway_port: int) -> Path:
    """Where the processes of a suite log, a file each."""
    return cache_dir() / "logs" / str(gateway_port)


def write_ready(path: Path, ready: Ready) -> None:
    """Readable by its owner alone, and whole whenever it is there. Raises StartupError."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(ready) + b"\n")
        part.replace(path)
    except OSError as error:
        raise StartupError(f"the ready file {path} cannot be written ({error.strerror}): name another") from None


def read_ready(path: Path) -> Ready | None:
    """None when no suite that still runs wrote it."""
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
