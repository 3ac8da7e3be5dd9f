"""Tests of which tests each target runs, and of what a fast test may not do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import TIERS, held_in, tier_of

TESTS = """
import contextlib, socket, subprocess, sys, time
import grpc.aio
import pytest

def test_pure():
    left, right = socket.socketpair()
    left.close(), right.close()
    time.sleep(0)

def test_process():
    subprocess.Popen([sys.executable, "-c", ""]).wait()

def test_port():
    socket.create_server(("127.0.0.1", 0)).close()

async def test_grpc_port():
    grpc.aio.server().add_insecure_port("127.0.0.1:0")

def test_sleep():
    time.sleep(0.001)

def test_error_of_its_own():
    with contextlib.suppress(BaseException):
        test_process()

@pytest.fixture(scope="module")
def port():
    socket.create_server(("127.0.0.1", 0)).close()

def test_fixture(port):
    pass

@pytest.mark.system
def test_marked():
    test_process(), test_port(), test_sleep()
"""


@pytest.mark.parametrize(
    ("path", "marks", "tier"),
    [
        ("tests/unit/test_a.py::test_b", (), "fast"),
        ("tests/property/test_a.py::test_b[x]", (), "fast"),
        ("tests/unit/test_a.py::test_b", ("system", "timeout"), "test"),
        ("tests/unit/test_a.py::test_b", ("torch",), "test"),
        ("tests/unit/test_a.py::test_b", ("alone",), "rest"),
        ("tests/unit/torch/test_torch_models.py::test_b", (), "test"),
        ("tests/contract/test_bus_contract.py::test_b[embedded]", (), "test"),
        ("tests/contract/test_bus_contract.py::test_b[real]", ("kafka",), "rest"),
        ("tests/contract/stores/test_registry_contract.py::test_b[real]", ("redis",), "rest"),
        ("tests/e2e/up/test_shapes_stay.py::test_b", ("suite",), "test"),
        ("tests/e2e/page/test_dashboard.py::test_b", ("suite",), "rest"),
        ("tests/faults/gateway/test_half_open.py::test_b", ("alone",), "rest"),
        ("tests/e2e/test_clients.py::test_b", ("alone", "packages"), "all"),
    ],
)
def test_a_tests_tier_follows_from_its_folder_and_marks(path: str, marks: tuple[str, ...], tier: str) -> None:
    assert tier_of(path, marks) == tier


@pytest.mark.parametrize("tier", ["fast", "test", "rest"])
def test_test_and_rest_together_run_every_test_once(tier: str) -> None:
    assert [held_in("test", tier), held_in("rest", tier)].count(True) == 1
    assert held_in("all", tier) and held_in("all", "all")
    assert not held_in("test", "all") and not held_in("rest", "all")
    assert [requested for requested in TIERS if held_in(requested, "fast")] == ["fast", "test", "all"]


@pytest.mark.system
def test_a_fast_test_that_starts_a_process_binds_a_port_or_sleeps_fails_and_names_the_mark(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\ntestpaths = tests\nmarkers = system\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.tiers", "-p", "no:cacheprovider", "-rA", "--tb", "line"]
    env = {"PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    done = subprocess.run(
        [*command, "-n", "0", "--tier", "all"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    passed = {line.split("::")[1] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    assert {"test_pure", "test_marked"} <= passed, done.stdout
    failed = {
        line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    }
    guarded = {"test_process", "test_port", "test_grpc_port", "test_sleep", "test_error_of_its_own", "test_fixture"}
    assert failed == guarded, done.stdout
    assert "test_it.py::test_port binds a port: mark it `system`" in done.stdout
