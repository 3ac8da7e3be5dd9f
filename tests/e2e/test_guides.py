"""The shell blocks of how-to and reference pages, typed line by line against suites of simulated GPUs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from libs.testing.guides import GUIDES, NOT_TYPED
from libs.testing.suites.suite import RunningSuite, running_suite

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(rf"^```sh\n(.*?)^```\n(?!{NOT_TYPED})(?:<!-- expects: (.*?) -->)?", re.MULTILINE | re.DOTALL)
LINE_LIMIT_S = 100
# Commands that go on until Ctrl-C are stopped after this time.
WATCHED_S = 6
STOPPED = (0, 124, 130)
# `fulcrum up` is the fixture, and what else a page sets up is there: weights, certificates, a checkout.
NOT_A_COMMAND = ("fulcrum up", "#")
DEMAND = "t_s,requests_per_s,known_requests_per_s,prefill_tokens_per_s,decode_tokens_per_s\n"
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
        self.folder, self.replaced = folder, replaced
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
        assert shown.strip() or "=" in line, f"{line} shows nothing"
        return shown


def _quoted(line: str) -> str:
    return "'" + line.partition("  #")[0].replace("'", "'\\''") + "'"


def ask(suite: RunningSuite) -> str:
    """Ask once and return the id of the request."""
    body = {"model": "sim", "prompt": "word " * 200, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{suite.gateway}/v1/completions", json=body, timeout=60).raise_for_status()
    return str(answer.headers["x-request-id"])


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_can_be_typed_as_it_stands(page: str, tmp_path: Path) -> None:
    files(tmp_path)
    if not GUIDES[page]:
        typed(page, Terminal(tmp_path, {}, {}))
        return
    env = {"FULCRUM_WORKER_NAMES": "gpu", "FULCRUM_PLANNER_MODE": "auto"}
    with running_suite(tmp_path, *GUIDES[page], env=env) as suite:
        host = suite.gateway.removeprefix("http://")
        replaced = {"localhost:8000": host, "127.0.0.1:8000": host}
        if page not in ("models",):
            replaced |= {"3f2a9c1e": ask(suite)[:8], "SmolLM2-135M-Instruct": "sim"}
            (decision, *_) = httpx.get(f"{suite.ready['planner']}/v1/decisions?limit=1").json()["decisions"]
            replaced["explain 43"] = f"explain {decision['sequence']}"
        typed(page, Terminal(tmp_path, suite.env, replaced))


def typed(page: str, terminal: Terminal) -> None:
    lines = list(lines_of(page))
    assert lines, f"docs/{page}.md has no block to type"
    for line, expected in lines:
        assert expected in terminal.type(line), line
