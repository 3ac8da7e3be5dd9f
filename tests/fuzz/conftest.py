"""Duration and counters of fuzzing a live suite; `make fuzz` runs it long."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from libs.testing.suites.suite import RunningSuite, running_suite

COUNTS = pytest.StashKey[Counter[str]]()
SHORT_EXAMPLES = 12
"""The examples that a run of all tests has time for."""


@dataclass
class Fuzz:
    """The number of examples that each test tries, and their results."""

    examples: int
    counts: Counter[str] = field(default_factory=Counter)

    def settings(self, share: float = 1.0) -> settings:
        """Return the settings of one property; `share` of the examples if they cost more or less than others."""
        return settings(
            max_examples=max(int(self.examples * share), 2),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=self.examples <= SHORT_EXAMPLES,  # a run of all tests must not fail by chance
            database=None,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(COUNTS, Counter[str]())
    if counts and config.getoption("--fuzz-examples"):
        terminalreporter.section("fuzz counts")
        for name, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:>9}  {name}")


@pytest.fixture(scope="session")
def fuzz(pytestconfig: pytest.Config) -> Fuzz:
    counts = pytestconfig.stash.setdefault(COUNTS, Counter())
    return Fuzz(pytestconfig.getoption("--fuzz-examples") or SHORT_EXAMPLES, counts)


@pytest.fixture(scope="module")
def live_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """Yield a suite of processes. At the end all still run, apart from children of their own, and none has logged a
    fault."""
    folder = tmp_path_factory.mktemp("fuzz")
    env = {"FULCRUM_CACHE": str(folder / "cache"), "FULCRUM_WORKER_SIM_SPEEDUP": "5000"}
    with running_suite(folder, "--engine", "sim", "--mixed", "1", env=env) as suite:
        started = _processes(suite)
        yield suite
        assert not started - _processes(suite), "a process of the suite has ended"
        assert not _faults(folder), _faults(folder)


def _processes(suite: RunningSuite) -> set[int]:
    return {child.pid for child in psutil.Process(suite.process.pid).children(recursive=True)}


def _faults(folder: Path) -> list[str]:
    """Return the log lines of unexpected errors."""
    lines = (line for log in folder.rglob("*.log") for line in log.read_text().splitlines())
    return [line[:2000] for line in lines if "Traceback" in line or "task failed" in line]
