"""Tests of plain command lines that bypass typer, and of those left to it."""

import subprocess
import sys
from importlib import import_module
from itertools import combinations
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.cli.main import QUICK, app, plain_call


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """Record the calls of a command instead of making them."""
    calls: list[tuple[Any, ...]] = []

    def record(*given: Any, **named: Any) -> None:
        ready, *more = given
        window = dict(zip(["window"], more, strict=False))
        calls.append((ready, {**window, **named}))

    monkeypatch.setattr(import_module(f"libs.cli.{QUICK[name].module}"), QUICK[name].function, record)
    return calls


def calls_of(name: str) -> list[str]:
    """Return the arguments that the command requires."""
    return ["gpu-1", "gpu-2", "prefill"] if QUICK[name].words else []


@pytest.mark.parametrize("name", QUICK)
def test_a_plain_command_line_makes_the_same_call_as_typer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULCRUM_READY", raising=False)
    calls = called(monkeypatch, name)
    words = [*([flag] for flag in (*QUICK[name].flags, "--json")), ["--ready", "suite.json"]]
    for count in range(len(words) + 1):
        for chosen in combinations(words, count):
            line = [*name.split(), *calls_of(name), *(word for each in chosen for word in each)]
            plain = plain_call(line)
            assert plain is not None
            plain()
            assert CliRunner().invoke(app, line).exit_code == 0
            assert calls[-1] == calls[-2], line
    monkeypatch.setenv("FULCRUM_READY", "named.json")
    plain = plain_call([*name.split(), *calls_of(name)])
    assert plain is not None
    plain()
    CliRunner().invoke(app, [*name.split(), *calls_of(name)])
    assert calls[-1] == calls[-2]
    assert str(calls[-1][0]) == "named.json"


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--help"],
        ["status", "--help"],
        ["status", "now"],
        ["status", "--ready"],
        ["events", "-n", "5"],
        ["role"],
        ["role", "gpu-1"],
        ["role", "gpu-1", "prefill", "--reason", "why"],
        ["top", "--metrics", "http://a"],
    ],
)
def test_a_command_line_that_is_not_plain_is_left_to_typer(line: list[str]) -> None:
    assert plain_call(line) is None


def test_shell_completion_is_left_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FULCRUM_COMPLETE", "complete_bash")
    assert plain_call(["status"]) is None


@pytest.mark.system
@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        (["status"], ("grpc", "httpx", "typer", "pydantic", "torch", "asyncio")),
        (["top", "--once"], ("grpc", "httpx", "typer", "pydantic", "torch", "textual", "rich")),
        (["tune", "decode"], ("httpx", "typer", "pydantic", "torch", "structlog", "rich")),
        (["role", "gpu-1", "prefill"], ("httpx", "typer", "pydantic", "torch", "structlog", "rich")),
    ],
)
def test_a_plain_command_line_imports_no_slow_package(line: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.argv = {['fulcrum', *line, '--ready', 'none']}\n"
        "from libs.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
