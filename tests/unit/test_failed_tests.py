"""Which tests failed, as a script reads it from what pytest has written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libs.testing import failed_tests as program

pytestmark = pytest.mark.system

FAILING = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no")

@pytest.fixture
def breaks():
    yield
    raise OSError("no")

def test_passes(): pass
def test_setup(broken): pass
@pytest.mark.parametrize("text", ["a b", '<&"'])
def test_body(text): assert not text
def test_twice(breaks): assert False
class TestClass:
    def test_method(self): assert False
"""
CRASHES = "import os\ndef test_crash(): os._exit(3)"
BREAKS_PYTEST = "def pytest_runtest_logfinish(): raise RuntimeError('broken')"


def said(folder: Path, **files: str) -> tuple[int, list[str]]:
    """What pytest's own run over these files comes to."""
    (folder / "tests").mkdir()
    for name, text in files.items():
        (folder / "tests" / f"{name}.py").write_text(text)
    results = folder / "results.xml"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "--import-mode=importlib"]
    words = [*options, "--junitxml", str(results), "-o", "junit_family=xunit1"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *words, "tests"]
    subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
    command = [sys.executable, "-I", "-S", program.__file__, str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_failed_tests_are_named_once_each_as_pytest_takes_them(tmp_path: Path) -> None:
    code, lines = said(tmp_path, test_a=FAILING)
    assert code == 0
    assert lines == [
        "tests/test_a.py::test_setup",
        "tests/test_a.py::test_body[a b]",
        'tests/test_a.py::test_body[<&"]',
        "tests/test_a.py::test_twice",
        "tests/test_a.py::TestClass::test_method",
    ]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"test_a": FAILING, "test_b": "import no_such_module"}, "collection failure: tests.test_b"),
        ({"test_a": FAILING, "conftest": BREAKS_PYTEST}, "internal error: internal"),
        ({"test_a": CRASHES}, "it crashed, or never began to test"),
        ({"test_a": "def test_passes(): pass"}, "no test has failed, and yet it did"),
    ],
    ids=["collection", "internal", "crash", "none"],
)
def test_what_is_no_failure_of_a_test_has_no_names(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    assert said(tmp_path, **files) == (1, [reason])
