"""Tests that type the tutorials as they stand."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from libs.testing.suites.suite import running_suite

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
SH = re.compile(r"^```sh\n(.*?)^```\n(?:<!-- expects: (.*?) -->)?", re.MULTILINE | re.DOTALL)
FILES = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Clients, workers and GPU times are real here: on a loaded machine the cores are short, and the output says so.
pytestmark = [pytest.mark.alone, pytest.mark.suite]

LIMIT_S = 200
STEP_S = 60
# The output of a command may take a while to come true, so the command is repeated until it does.
TYPED = """
typed() {{ {command}
}}
end=$((SECONDS + {step_s}))
while [ $SECONDS -lt $end ]; do
  shown="$(typed 2>&1)"
  grep -qF {expected} <<<"$shown" && break
  sleep 1
done
grep -qF {expected} <<<"$shown" || {{ echo {expected} is not in: "$shown"; exit 1; }}
"""


def script(blocks: list[tuple[str, str]]) -> str:
    """Return one shell script of all commands but those that start and stop the suite."""
    lines = [
        "set -m",
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
        f'fulcrum() {{ {shlex.quote(sys.executable)} -m libs.cli.main "$@"; }}',
    ]
    for command, expected in blocks:
        if command.startswith(("fulcrum up", "fulcrum down")):
            continue
        typed = (
            TYPED.format(command=command.strip(), expected=shlex.quote(expected), step_s=STEP_S)
            if expected
            else command
        )
        lines.append(typed)
    return "\n".join(lines)


def run(typed: str, folder: Path, env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    own = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    command = ("bash", "-c", typed)
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize(
    "page", [pytest.param("first-answer", marks=pytest.mark.torch), "first-imbalance", "first-batch"]
)
def test_a_tutorial_prints_what_it_promises(page: str, tmp_path: Path) -> None:
    text = (TUTORIALS / f"{page}.md").read_text()
    blocks = SH.findall(text)
    (up,) = [shlex.split(command)[2:] for command, _ in blocks if command.startswith("fulcrum up")]
    assert blocks[-1][0] == "fulcrum down\n"
    with running_suite(tmp_path, *up) as suite:
        for name, code in FILES.findall(text):
            (tmp_path / name).write_text(code.replace("http://127.0.0.1:8000", suite.gateway))
        typed = script(blocks).replace("http://127.0.0.1:8000", suite.gateway)
        done = run(typed, tmp_path, suite.env)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_tutorial_without_a_suite_prints_what_it_promises(tmp_path: Path) -> None:
    blocks = SH.findall((TUTORIALS / "first-plan.md").read_text())
    assert len(blocks) > 2
    done = run(script(blocks), tmp_path, {})
    assert done.returncode == 0, done.stdout + done.stderr
