"""The servers to observe: a list of addresses, or a TOML file that may change."""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from libs.contracts.errors import InvalidRequest
from libs.policy.roles import MAX_BUDGET_TOKENS

MOST_SERVERS: Final = 2_000
"""The maximum number of servers that one process observes."""
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
MAX_NAME_CHARS: Final = 200
MAX_GPUS: Final = 4_096
ROLES: Final = ("prefill", "decode", "mixed")
TABLE: Final = "server"
# vLLM does not export these two settings; they are its defaults for servers with less than 70 GiB a GPU.
CHUNK_TOKENS: Final = 2_048
MAX_SEQUENCES: Final = 256


@dataclass(frozen=True, slots=True)
class ObservedTarget:
    """A server to observe; the fields are the keys of a `[[server]]` table."""

    url: str
    name: str = ""
    """The server's name in figures; host and port if empty."""
    role: str = "mixed"
    """The role that the router assigns: prefill, decode or mixed."""
    model: str = ""
    """The name of the model; if empty, that in the server's own metrics."""
    gpus: int = 1
    chunk_tokens: int = CHUNK_TOKENS
    """The value of the server's option --max-num-batched-tokens."""
    max_sequences: int = MAX_SEQUENCES
    """The value of the server's option --max-num-seqs."""
    token_env: str = ""
    """The name of the environment variable that contains the server's bearer token."""

    @property
    def node(self) -> str:
        return urlsplit(self.url).hostname or self.url


_KEYS: Final = {each.name: each.type for each in fields(ObservedTarget)}
_MOST: Final = {"gpus": MAX_GPUS, "chunk_tokens": MAX_BUDGET_TOKENS, "max_sequences": 1_000_000}


def targets_of(urls: Sequence[str]) -> list[ObservedTarget]:
    """Return the servers at these addresses. Raise InvalidRequest."""
    return _checked([_target({"url": url}, repr(url)) for url in urls])


def read_fleet(file: Path) -> list[ObservedTarget]:
    """Return the servers of a file. Raise InvalidRequest, which names the faulty table."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{file} is over {MAX_FILE_BYTES} bytes")
        found = tomllib.loads(text.decode())
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequest(f"{file} is not TOML: {error}") from None
    tables = found.pop(TABLE, [])
    if found or not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise InvalidRequest(f"{file}: only tables [[{TABLE}]] belong there")
    return _checked([_target(each, f"{file}, [[{TABLE}]] {number}") for number, each in enumerate(tables, 1)])


def token_of(target: ObservedTarget) -> str:
    """Return a server's bearer token; empty if it needs none. Raise InvalidRequest if its variable is not set."""
    if not target.token_env:
        return ""
    token = os.environ.get(target.token_env, "")
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidRequest(f"{target.token_env}, named by token_env, holds no token")
    return token


def _target(table: dict[str, Any], where: str) -> ObservedTarget:
    for key, value in table.items():
        if key not in _KEYS:
            raise InvalidRequest(f"{where}: {key[:40]!r} is none of {', '.join(_KEYS)}")
        if not isinstance(value, int if _KEYS[key] in (int, "int") else str) or isinstance(value, bool):
            raise InvalidRequest(f"{where}: {key} is {str(value)[:40]!r}, which is not of its type")
        if isinstance(value, int) and not 1 <= value <= _MOST[key]:
            raise InvalidRequest(f"{where}: {key} must be 1 to {_MOST[key]}")
        if isinstance(value, str) and (len(value) > MAX_NAME_CHARS or not value.isprintable()):
            raise InvalidRequest(f"{where}: {key} is over {MAX_NAME_CHARS} characters, or has control characters")
    url = str(table.get("url", "")).rstrip("/").removesuffix("/metrics")
    if not _is_address(url):
        raise InvalidRequest(f"{where}: {url[:80]!r} is not the address of a server, such as http://host:port")
    role = table.get("role", "mixed")
    if role not in ROLES:
        raise InvalidRequest(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    return ObservedTarget(**{**table, "url": url, "name": table.get("name") or urlsplit(url).netloc})


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    path_is_plain = url.isascii() and url.isprintable() and " " not in url and not (parts.query or parts.fragment)
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and port != 0 and "@" not in url and path_is_plain


def _checked(targets: list[ObservedTarget]) -> list[ObservedTarget]:
    if len(targets) > MOST_SERVERS:
        raise InvalidRequest(f"{len(targets)} servers: one process observes {MOST_SERVERS} at most")
    known: set[str] = set()
    for each in targets:
        for name in {each.name, each.url}:
            if name in known:
                raise InvalidRequest(f"{name!r} is there twice")
            known.add(name)
    return targets
