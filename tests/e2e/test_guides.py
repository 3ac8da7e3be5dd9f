"""Tests that type the shell blocks of how-to and reference pages against suites of simulated GPUs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from libs.testing.guides import GUIDES, NOT_TYPED, SUITE, TYPED_ELSEWHERE
from libs.testing.suites.suite import RunningSuite, running_suite

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SKIPPED = f"{NOT_TYPED}|{TYPED_ELSEWHERE}"
BLOCK = re.compile(rf"^```sh\n((?:(?!```).*\n)*)```\n(?!{SKIPPED})(?:<!-- expects: (.*?) -->)?", re.MULTILINE)
LINE_LIMIT_S = 100
# Commands that go on until Ctrl-C are stopped after this time.
WATCHED_S = 6
STOPPED = (0, 124, 130)
# `fulcrum up` is the fixture, and what else a page sets up is there: weights, certificates, a checkout.
NOT_A_COMMAND = ("fulcrum up", "#")
ENV = {"FULCRUM_WORKER_NAMES": "gpu", "FULCRUM_PLANNER_MODE": "auto"}
KEY = "key_0a1b2c3d4e5f"
pytestmark = [pytest.mark.alone, pytest.mark.suite]


def lines_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page, each with what it has to print; the expectation of a block is its last line's."""
    for block, expected in BLOCK.findall((DOCS / f"{page}.md").read_text()):
        lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        for at, line in enumerate(lines):
            if not line.startswith(NOT_A_COMMAND):
                yield line, expected if at == len(lines) - 1 else ""


def files(folder: Path) -> None:
    """Write the files that pages name."""
    line = '{"custom_id": "q-%d", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "sim", '
    line += '"max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}}\n'
    (folder / "requests.jsonl").write_text("".join(line % number for number in range(10)))
    rows = (f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0000000,400,20\n" for at in range(60))
    (folder / "mine.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))


class Terminal:
    """A shell in which `fulcrum` is the one of this checkout."""

    def __init__(self, folder: Path, env: Mapping[str, str], replaced: Mapping[str, str]) -> None:
        self.folder, self.replaced = folder, dict(replaced)
        (folder / "bin").mkdir()
        program = folder / "bin" / "fulcrum"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m libs.cli.main "$@"\n')
        program.chmod(0o755)
        path = f"{program.parent}:{os.environ['PATH']}"
        self.env = {**os.environ, **env, "PYTHONPATH": str(ROOT), "PATH": path, "TERM": "xterm-256color"}

    def type(self, line: str) -> str:
        """Type a line and return what it shows; fail where it fails or shows nothing."""
        for text, by in self.replaced.items():
            line = line.replace(text, by)
        watched = line.startswith("fulcrum top") or "--follow" in line
        typed = f"timeout -s INT {WATCHED_S} script -qec {_quoted(line)} /dev/null" if watched else line
        done = subprocess.run(
            ("bash", "-c", typed), cwd=self.folder, env=self.env, input="y\n",
            capture_output=True, text=True, timeout=LINE_LIMIT_S, check=False,
        )  # fmt: skip
        shown = done.stdout + done.stderr
        assert done.returncode in (STOPPED if watched else (0,)), f"{line}: {done.returncode}\n{shown}"
        assert "Traceback" not in shown, f"{line}\n{shown}"
        assert shown.strip() or "--json" in line, f"{line} shows nothing"
        return shown


def _quoted(line: str) -> str:
    return "'" + line.partition("  #")[0].replace("'", "'\\''") + "'"


def ask(suite: RunningSuite) -> str:
    """Ask once and return the id of the request."""
    body = {"model": "sim", "prompt": "word " * 200, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{suite.gateway}/v1/completions", json=body, timeout=60).raise_for_status()
    return str(answer.headers["x-request-id"])


def newest_key(terminal: Terminal) -> str:
    return str(json.loads(terminal.type("fulcrum keys list --json"))[-1]["id"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """One suite for all pages but those that change who may call it."""
    with running_suite(tmp_path_factory.mktemp("shared"), *SUITE, env=ENV) as suite:
        assert suite.fulcrum("role", "gpu-6", "prefill").returncode == 0  # a decision that can be explained
        yield suite


def type_page(page: str, terminal: Terminal) -> None:
    lines = list(lines_of(page))
    assert lines, f"docs/{page}.md has no block to type"
    for line, expected in lines:
        if KEY in line:
            terminal.replaced[KEY] = newest_key(terminal)
        shown = terminal.type(line)
        assert expected in shown, f"{line} shows no {expected}:\n{shown}"


def terminal_of(suite: RunningSuite, folder: Path) -> Terminal:
    """Open a terminal in which pages' addresses, models and ids are those of a suite that has answered once."""
    host = suite.gateway.removeprefix("http://")
    request_id = ask(suite)
    decisions = httpx.get(f"{suite.ready['planner']}/v1/decisions?limit=100").raise_for_status().json()
    moved = next((each["sequence"] for each in decisions if each["action"] == "role_moved"), 0)
    replaced = {"localhost:8000": host, "127.0.0.1:8000": host, "SmolLM2-135M-Instruct": "sim"}
    replaced |= {"3f2a9c1e": request_id[:8], "explain 43": f"explain {moved}"}
    return Terminal(folder, suite.env, replaced)


@pytest.mark.parametrize("page", [page for page, up in GUIDES.items() if up == SUITE])
def test_the_commands_of_a_guide_work_as_they_stand(page: str, shared: RunningSuite, tmp_path: Path) -> None:
    files(tmp_path)
    type_page(page, terminal_of(shared, tmp_path))


def test_the_commands_of_a_guide_to_keys_work_as_they_stand(tmp_path: Path) -> None:
    with running_suite(tmp_path, *GUIDES["security"], env=ENV) as suite:
        type_page("security", terminal_of(suite, tmp_path))


def test_the_commands_of_a_guide_to_a_pool_work_as_they_stand(tmp_path: Path) -> None:
    with running_suite(tmp_path, *GUIDES["models"], env=ENV) as suite:
        type_page("models", Terminal(tmp_path, suite.env, {}))


@pytest.mark.parametrize("page", [page for page, up in GUIDES.items() if not up])
def test_the_commands_of_a_guide_without_a_suite_work_as_they_stand(page: str, tmp_path: Path) -> None:
    files(tmp_path)
    type_page(page, Terminal(tmp_path, {}, {}))
