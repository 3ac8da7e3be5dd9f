"""Where the suite is that a command talks to, and how to say that there is none."""

from pathlib import Path
from typing import Any

import httpx

from libs.contracts.errors import StartupError
from libs.launch.ready import DEFAULT_GATEWAY_PORT, Ready, default_ready_file, read_ready

TIMEOUT_S = 10.0


def find_suite(ready_file: Path | None) -> Ready:
    """From the file that is named, else the default suite's file, else the default addresses."""
    if ready_file is not None:
        ready = read_ready(ready_file)
        if ready is None:
            raise StartupError(
                f"no suite runs behind {ready_file}: start one with `fulcrum up --json-ready {ready_file}`"
            )
        return ready
    return read_ready(default_ready_file(DEFAULT_GATEWAY_PORT)) or _default()


def find_one_suite(ready_file: Path | None) -> Ready:
    """For commands that change something: a suite that is named, or the only one there is."""
    if ready_file is None:
        files = sorted(default_ready_file(DEFAULT_GATEWAY_PORT).parent.glob("*.json"))
        running = [(file, ready) for file in files if (ready := read_ready(file)) is not None]
        if len(running) > 1:
            raise StartupError(
                f"{len(running)} suites run here: name one with --ready FILE, of "
                + ", ".join(f"{file} ({ready.gateway})" for file, ready in running)
            )
        if running:
            return running[0][1]
    return find_suite(ready_file)


def no_suite(url: str) -> StartupError:
    """For a suite that does not answer."""
    return StartupError(
        f"no suite answers at {url}: start one with `fulcrum up`, or name its ready file in FULCRUM_READY"
    )


def get_json(base_url: str, path: str, **params: str) -> Any:
    """What a service answers; raises StartupError that says what to do."""
    try:
        answer = httpx.get(f"{base_url}{path}", params=params, timeout=TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        raise no_suite(base_url) from None
    if answer.is_success:
        return answer.json()
    raise StartupError(f"{base_url}{path} refused: {error_text(answer)}")


def put_json(base_url: str, path: str, body: dict[str, Any], *, token: str) -> Any:
    """What a service answers to an admin verb; raises StartupError that says what to do."""
    headers = {"authorization": f"Bearer {token}"}
    try:
        answer = httpx.put(f"{base_url}{path}", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        raise no_suite(base_url) from None
    if answer.is_success:
        return answer.json()
    raise StartupError(f"{base_url}{path} refused: {error_text(answer)}")


def checked(answer: httpx.Response) -> dict[str, Any]:
    """What the gateway answers; raises StartupError where it refused."""
    if not answer.is_success:
        raise StartupError(f"the gateway refused: {error_text(answer)}")
    found: dict[str, Any] = answer.json()
    return found


def error_text(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's or FastAPI's shape, else its status."""
    try:
        body = answer.json()
        error = body.get("error", body)
        return str(error.get("message") or error["detail"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        return f"HTTP {answer.status_code}"


def _default() -> Ready:
    gateway, planner, metrics = (f"http://127.0.0.1:{DEFAULT_GATEWAY_PORT + step}" for step in range(3))
    return Ready(
        gateway=gateway, gateways=(gateway,), planner=planner, metrics=metrics,
        pid=0, token="", kafka="", redis="", cluster="", model="", engine="",
    )  # fmt: skip
