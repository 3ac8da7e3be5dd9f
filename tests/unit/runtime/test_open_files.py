"""Tests that the connections of a process are bounded by the files it may open."""

import resource
from collections.abc import Iterator

import pytest

from libs.runtime.net.ports import max_open_files, raise_open_files
from services.planner.settings import PlannerSettings


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Yield (soft, hard), and restore them at the end."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


def test_only_a_shells_low_limit_is_raised(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    raise_open_files()
    assert max_open_files() > 1024
    raised = max_open_files()
    raise_open_files()
    assert max_open_files() == raised


def test_connections_leave_half_of_the_open_files_for_other_uses(limits: tuple[int, int]) -> None:
    assert PlannerSettings(http_max_connections=100).http_guard().bounds.max_connections == 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, limits[1]))
    bounds = PlannerSettings(http_max_connections=100_000).http_guard().bounds
    assert (bounds.max_connections, bounds.max_connections_per_address) == (500, 500)
