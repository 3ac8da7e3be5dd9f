"""The lab compiled by `deploy/compile.py` says what the lab in plain Python says.

By default only what decides is compiled, which takes a minute; with FULCRUM_TEST_COMPILED all that a run uses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.compile import DECISIONS, MODULES, ROOT, build, missing
from tests.compile_jobs import compile_jobs

WHOLE = bool(os.environ.get("FULCRUM_TEST_COMPILED"))
GLOBS = MODULES if WHOLE else DECISIONS
RUN = ["lab", "run", "--workers", "8", "--json"]
PROGRAM = "import sys; from libs.cli.main import main; sys.argv[0] = 'fulcrum'; main()"

pytestmark = [
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := missing():
        pytest.skip(f"cannot compile: {lacking}")
    folder = tmp_path_factory.mktemp("compiled") / "lab"
    assert build(folder, 0, GLOBS, compile_jobs())  # faster to build, with the same results
    return folder


def run(folder: Path, *options: str) -> dict[str, Any]:
    """Return the output of one run with `libs` of that folder, without its run time."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", PROGRAM, *RUN, *options]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    del found["wall_s"]
    return found


def test_a_compiled_folder_that_is_up_to_date_is_not_rebuilt(compiled: Path) -> None:
    assert not build(compiled, 0, GLOBS)


def test_policies_run_compiled(compiled: Path) -> None:
    whole = ("libs.engine.core", "libs.dispatch.dispatcher", "libs.lab.cluster.worker") if WHOLE else ()
    names = "libs.policy.gateway.binding", "libs.policy.worker.pace", *whole
    program = f"import importlib; print(*[importlib.import_module(name).__file__ for name in {names}], sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(compiled)}
    command = [sys.executable, "-c", program]
    files = subprocess.run(command, cwd=compiled, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    for file in files.split():
        assert Path(file).is_relative_to(compiled), file
        assert file.endswith(".so"), file


@pytest.mark.parametrize(
    ("policy", "trace"),
    [
        ("fulcrum-auto", "flipflop:rate=10,seconds=20"),
        ("arrow+order+guard", "flipflop:rate=10,seconds=20"),
        *(
            [("fulcrum:5:3", "poisson:rate=12,seconds=60"), ("fulcrum", "flipflop:rate=10,seconds=120")]
            if WHOLE
            else []
        ),
    ],
)
def test_a_compiled_run_gives_the_figures_of_a_plain_one(compiled: Path, policy: str, trace: str) -> None:
    options = ["--policy", policy, "--trace", trace]
    plain, fast = run(ROOT, *options), run(compiled, *options)
    assert plain["completed"] > 0, plain
    assert fast == plain
