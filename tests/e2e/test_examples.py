"""Tests that run the examples of docs/examples.md as they stand."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients.asking import CLIENT_TIMEOUT_S, OFFLINE, Unavailable, agent_python, suite_on

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)\n```\n(?:<!-- expects: (.*?) -->)?", PAGE, re.MULTILINE | re.DOTALL)
PLOTS = [block for block in BLOCKS if "plot_ratio" in block[0]]
ASKING = [block for block in BLOCKS if block not in PLOTS]
MAX_LINES = 40


def typed(block: tuple[str, str], folder: Path, python: Path, **env: str) -> str:
    """Run a block where its `python` is this one; return what it printed, with what the page expects in it."""
    command, expected = block
    (folder / "bin").mkdir(exist_ok=True)
    runner = folder / "bin" / "python"
    runner.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    runner.chmod(0o755)
    own = {**os.environ, **OFFLINE, **env, "PATH": f"{runner.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=own, capture_output=True, text=True,
        timeout=CLIENT_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and expected in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_page_shows_every_tested_example_and_each_is_short() -> None:
    for file in FOLDER.iterdir():
        assert f'--8<-- "examples/{file.name}"' in PAGE
        assert any(file.name in command for command, _ in BLOCKS)
        assert len(file.read_text().splitlines()) <= MAX_LINES


@pytest.mark.system
def test_a_ratio_is_plotted_from_seconds_and_from_timestamps(folder: Path) -> None:
    for times in (("3600", "7200.5"), ("2026-01-31 01:00:00", "2026-01-31 02:00:00.25")):
        (folder / "requests.csv").write_text(f"time,prompt,output\n{times[0]},400,100\n{times[1]},100,100\n")
        tokens, gpu_time = (typed(block, folder, Path(sys.executable)) for block in PLOTS)
        assert tokens == "2.50 over all, 1.00 to 4.00\n"
        assert gpu_time == "0.31 over all, 0.12 to 0.50\n"
        assert "<svg" in (folder / "ratio.svg").read_text()


@pytest.fixture(scope="module", params=["sim", pytest.param("torch", marks=pytest.mark.torch)])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that the page exports, with the values of the test's suite."""
    with suite_on(request.param, tmp_path_factory.mktemp(request.param)) as (suite, model):
        yield {"OPENAI_BASE_URL": f"{suite.gateway}/v1", "OPENAI_API_KEY": "none", "MODEL": model}


@pytest.mark.alone
@pytest.mark.suite
@pytest.mark.packages
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", ASKING, ids=lambda block: block[0].split()[-1])
def test_an_example_gets_an_answer(exported: dict[str, str], folder: Path, block: tuple[str, str]) -> None:
    try:
        python = agent_python()
    except Unavailable as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            raise
        pytest.skip(str(error))
    typed(block, folder, python, **exported)
