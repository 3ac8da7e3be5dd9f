"""Tests of `fulcrum observe --page` beside foreign servers: page, status, verdict and a changing list."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from libs.runtime.net.ports import held_port
from libs.testing.suites.observe import observe_page
from tests.observe_rig import FakeVllm, Load, serving

pytestmark = pytest.mark.suite

PATIENCE_S = 60.0


@contextmanager
def observing(folder: Path, *arguments: str, **env: str) -> Iterator[dict[str, Any]]:
    """Yield the command's output once it serves."""
    with observe_page(folder, *arguments, **env) as page:
        try:
            yield page.answer
        finally:
            page.process.terminate()
            assert page.process.wait(PATIENCE_S) == 0
    assert not Path(page.answer["ready"]).exists()


def get(url: str) -> Any:
    with urlopen(url, timeout=10) as answer:
        return json.load(answer)


def until(url: str, holds: Callable[[Any], bool]) -> Any:
    """Return the first answer of a URL for which a condition holds."""
    last_s = time.monotonic() + PATIENCE_S
    while not holds(found := get(url)):
        assert time.monotonic() < last_s, found
        time.sleep(0.2)
    return found


def refuses(url: str) -> bool:
    """Return whether nothing listens on the port any more, which a truncated answer does not show."""
    try:
        get(url)
    except URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except (OSError, HTTPException):
        return False
    return False


def states(status: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in status["observed"]["servers"]}


def table(url: str, name: str, role: str, more: str = "") -> str:
    return f'[[server]]\nurl = "{url}"\nname = "{name}"\nrole = "{role}"\n{more}'


def test_the_service_ends_once_its_command_is_killed(tmp_path: Path) -> None:
    with held_port() as port:
        with observe_page(tmp_path, "--vllm", f"http://127.0.0.1:{port}") as running:
            page = running.answer["page"]
            assert get(f"{page}/healthz") is not None
            running.process.kill()
        last_s = time.monotonic() + PATIENCE_S
        while not refuses(f"{page}/healthz"):
            assert time.monotonic() < last_s


def test_two_servers_show_estimates_on_the_page_and_changes_of_the_list_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    prefill, decode = FakeVllm(Load(decoding=4, prompts_per_s=4)), FakeVllm(Load(decoding=24))
    with ExitStack() as stack:
        first = table(stack.enter_context(serving(prefill, "t0")), "p0", "prefill", 'token_env = "TOKEN_OF_P0"\n')
        second = table(stack.enter_context(serving(decode)), "d0", "decode")
        closed = table(f"http://127.0.0.1:{stack.enter_context(held_port())}", "d1", "decode")
        file.write_text(first + second)
        reported = stack.enter_context(observing(tmp_path, "--file", str(file), TOKEN_OF_P0="t0"))
        page = reported["page"]

        status = until(f"{page}/v1/status", lambda found: states(found) == {"p0": "observed", "d0": "observed"})
        assert status["verdict"]["code"] in ("balanced", "idle", "unknown")
        status = until(f"{page}/v1/status", lambda found: found["verdict"]["code"] == "balanced")
        assert status["estimate"]["low"] <= status["estimate"]["prefill"] <= status["estimate"]["high"]

        occupancy = until(f"{page}/v1/occupancy", lambda found: found["coverage"] > 0.9 and len(found["workers"]) == 2)
        assert {each["id"] for each in occupancy["workers"] if each["estimate"]} == {"p0", "d0"}
        assert occupancy["estimate"]["low"] is not None
        windows = until(f"{page}/v1/occupancy/history", lambda found: sum(found["gpu_ns"]["decode"]) > 0)
        assert windows["scope"] == "cluster"
        with urlopen(page) as answer:
            assert b"servers-table" in answer.read()

        file.write_text(first + second + closed)
        status = until(f"{page}/v1/status", lambda found: states(found).get("d1") == "away")
        assert states(status)["d0"] == "observed"
        file.write_text("[[server]]\n")
        status = until(f"{page}/v1/status", lambda found: bool(found["observed"]["trouble"]))
        assert set(states(status)) == {"p0", "d0", "d1"}
        file.write_text(second)
        until(
            f"{page}/v1/status",
            lambda found: states(found) == {"d0": "observed"} and found["observed"]["trouble"] == "",
        )

        screen = subprocess.run(
            [sys.executable, "-m", "libs.cli.main", "status", "--ready", reported["ready"]],
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert "All GPU time is estimated" in screen.stdout
        once = subprocess.run(
            [sys.executable, "-m", "libs.cli.main", "top", "--once", "--metrics", page],
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert "Estimated from the servers' own metrics" in once.stdout
