"""The suite that a command talks to: finding it, calling its services, and reporting its absence.

It uses plain `http.client`, because importing httpx takes 0.2 s, a noticeable delay before every printed table.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain_values
from libs.launch.ready import DEFAULT_GATEWAY_PORT, Ready, default_ready_file, read_ready

if TYPE_CHECKING:
    import httpx

    from libs.runtime.net.access import CallSettings

TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 0.5
FORECAST_TIMEOUT_S: Final = 60.0
"""The timeout of forecasts, several of which a suite with several models makes before it answers."""
CALL_VARIABLES: Final = ("FULCRUM_TLS_", "FULCRUM_TOKEN", "FULCRUM_ALLOW_PLAINTEXT_TOKEN")
"""The prefixes of the variables that secure calls to workers."""
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
OK: Final = range(200, 300)
UP: Final = b"up"
OBSERVE: Final = b"observe"
"""The commands whose processes are suites, as in their command line."""
KEY_VARIABLE: Final = "FULCRUM_API_KEY"
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_TOKENS: Final[dict[str, str]] = {}
"""The token of the suite that this command has found, by the addresses of its services. Later calls need no key."""


@dataclass(frozen=True, slots=True)
class _NoToken:
    def get_secret_value(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class _Unset:
    """The call settings of `CommonSettings` when the environment sets none of them."""

    cluster: str = "local"
    token: _NoToken = field(default_factory=_NoToken)
    allow_plaintext_token: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


def call_settings() -> "CallSettings":
    """Return how calls to workers are secured. Raise StartupError.

    The settings class is loaded only if the environment sets any of this: importing it takes longer than the rest of a
    command.
    """
    if not any(name.startswith(CALL_VARIABLES) for name in os.environ):
        return _Unset()
    from libs.runtime.settings import CommonSettings, load_settings  # noqa: PLC0415

    return load_settings(CommonSettings)


def find_suite(ready_file: Path | None, *, quiet: bool = False) -> Ready:
    """Return the suite of the named file, or the one at the default addresses, or the only one there is.

    In the last case it is named on stderr unless `quiet`. Raise StartupError if there are several, all at other
    addresses.
    """
    if ready_file is not None:
        ready = read_ready(ready_file)
        if ready is None:
            raise StartupError(
                f"no suite runs behind {ready_file}: start one with `fulcrum up --json-ready {ready_file}`"
            )
        return remember(ready)
    at_default = read_ready(default_ready_file(DEFAULT_GATEWAY_PORT))
    if at_default is not None:
        return remember(at_default)
    default = _default()
    # A killed suite leaves its file, whose process id may by now belong to another program.
    running = [(file, ready) for file, ready in _running() if _listens(ready.metrics)]
    if not running or _listens(default.metrics):  # containers serve there without a ready file
        return remember(default)
    if len(running) > 1:
        raise _several(running)
    file, only = running[0]
    if not quiet:
        sys.stderr.write(f"suite at {only.gateway or only.metrics} ({file})\n")
    # An observed fleet has no gateway, so calls of one fail with the usual error at the default address.
    return remember(only if only.gateway else msgspec.structs.replace(only, gateway=default.gateway))


def find_one_suite(ready_file: Path | None) -> Ready:
    """Return a suite for a command that changes something: the named one, or the only one there is."""
    if ready_file is None:
        running = _running()
        if len(running) > 1:
            # A killed suite leaves its file. Its port shows nothing, because a service of a live suite may be
            # restarting.
            running = [each for each in running if is_suite(each[1].pid, (UP, OBSERVE))] or running
        if len(running) > 1:
            raise _several(running)
        if running:
            return remember(running[0][1])
    return find_suite(ready_file)


def is_suite(pid: int, commands: Sequence[bytes]) -> bool:
    """Return whether the process is one of Fulcrum's `commands`; True if the system does not show the command.

    A ready file that outlived a restart of the machine may name another program's process.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
    named = any(b"fulcrum" in word or b"libs.cli" in word for word in words)
    return named and any(each in words for each in commands)


def _several(running: Sequence[tuple[Path, Ready]]) -> StartupError:
    return StartupError(
        f"{len(running)} suites run here: name one with --ready FILE, of "
        + ", ".join(f"{file} ({ready.gateway or ready.metrics})" for file, ready in running)
    )


def _listens(url: str) -> bool:
    """Return whether something on this machine accepts connections at `url`."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname, address.port), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def _running() -> list[tuple[Path, Ready]]:
    """Return the suites of this user that run on this machine, with their ready files."""
    files = sorted(default_ready_file(DEFAULT_GATEWAY_PORT).parent.glob("*.json"))
    return [(file, ready) for file in files if (ready := read_ready(file)) is not None]


def key_headers(url: str) -> dict[str, str]:
    """Return the headers that identify the caller to the service at `url`.

    They hold FULCRUM_API_KEY if it is set, or else the token of a suite on this machine, which is sent nowhere else.
    """
    address = urlsplit(url)
    token = _TOKENS.get(f"{address.scheme}://{address.netloc}", "") if address.hostname in _LOOPBACK else ""
    key = os.environ.get(KEY_VARIABLE, "") or token
    return {"authorization": f"Bearer {key}"} if key else {}


def remember(ready: Ready) -> Ready:
    """Remember a suite's token for later calls to its services, and return the suite."""
    _TOKENS.update(dict.fromkeys((*ready.gateways, ready.gateway, ready.planner, ready.metrics), ready.token))
    return ready


def no_suite(url: str) -> StartupError:
    """Return the error for a suite that does not answer."""
    others = [f"FULCRUM_READY={file} ({ready.gateway or ready.metrics})" for file, ready in _running()]
    named = f" here: {', '.join(others)}" if others else " in FULCRUM_READY"
    return StartupError(f"no suite answers at {url}: start one with `fulcrum up`, or name the ready file of one{named}")


def get_json(base_url: str, path: str, timeout_s: float = TIMEOUT_S, /, *, exact: bool = False, **params: str) -> Any:
    """Return a service's answer with its text escaped for people. Raise StartupError, which says what to do.

    `exact` leaves the text unchanged, for programs and for values that are sent back.
    """
    query = f"{path}?{urlencode(params)}" if params else path
    found = _answer(base_url, "GET", query, {}, None, timeout_s=timeout_s)
    return found if exact else plain_values(found)


def put_json(base_url: str, path: str, body: dict[str, Any], *, token: str, exact: bool = False) -> Any:
    """Return the answer to a PUT on an admin route. Raise StartupError, which says what to do."""
    return ask_json(base_url, "PUT", path, body, token=token, exact=exact)


def ask_json(
    base_url: str, method: str, path: str, body: dict[str, Any] | None, *, token: str, exact: bool = False
) -> Any:
    """Return the answer to a call of any method. Raise StartupError, which says what to do."""
    own = {"authorization": f"Bearer {token}"} if token else {}
    headers = {"content-type": "application/json", **own}
    found = _answer(base_url, method, path, headers, None if body is None else json.dumps(body).encode())
    return found if exact else plain_values(found)


def _answer(
    base_url: str, method: str, path: str, headers: dict[str, str], body: bytes | None, *, timeout_s: float = TIMEOUT_S
) -> Any:
    url = urlsplit(base_url)
    connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
    try:
        with closing(connect(url.hostname or "", url.port, timeout=timeout_s)) as connection:
            sent = {**key_headers(base_url), **headers}
            connection.request(method, f"{url.path.rstrip('/')}{path}", body, sent)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES)
    except (OSError, HTTPException):
        raise no_suite(base_url) from None
    if answer.status not in OK:
        raise StartupError(
            f"{base_url}{path} refused: {_message(answer.status, content)}{_no_key(answer.status, sent)}"
        )
    try:
        return json.loads(content)
    except ValueError:
        raise StartupError(f"{base_url}{path} does not answer in JSON: is it a suite?") from None


def _no_key(status: int, sent: Mapping[str, str]) -> str:
    """Return the remedy for a caller without a key after a refusal; empty for other refusals."""
    if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or "authorization" in sent:
        return ""
    return f". Set {KEY_VARIABLE}, or wait until `fulcrum up` says that its suite serves: then its token is used"


def checked(answer: "httpx.Response") -> dict[str, Any]:
    """Return the gateway's JSON answer. Raise StartupError if it refused."""
    if not answer.is_success:
        raise StartupError(f"the gateway refused: {error_text(answer)}")
    found: dict[str, Any] = answer.json()
    return found


def error_text(answer: "httpx.Response") -> str:
    """Return the message of an error in OpenAI's or FastAPI's shape, or else its status."""
    return _message(answer.status_code, answer.content)


def _message(status: int, content: bytes) -> str:
    try:
        body = json.loads(content)
        error = body.get("error", body)
        return str(error.get("message") or error["detail"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        return f"HTTP {status}"


def _default() -> Ready:
    gateway, planner, metrics = (f"http://127.0.0.1:{DEFAULT_GATEWAY_PORT + step}" for step in range(3))
    return Ready(
        gateway=gateway, gateways=(gateway,), planner=planner, metrics=metrics,
        pid=0, token="", kafka="", redis="", cluster="", model="", engine="",
    )  # fmt: skip


def local_user() -> str:
    """Return the name of the user who runs this process, or a placeholder if it is unknown."""
    import getpass  # noqa: PLC0415 (what few commands need)

    try:
        return getpass.getuser() or "somebody"
    except (KeyError, OSError):  # a user without a name
        return "somebody"
