"""A pytest plugin: which tests run by which target, and what a fast one may not do. CONTRIBUTING.md says how to use it.

    fast   tests/unit and tests/property, less tests/unit/torch and what is marked `system`, `torch` or `slow`
    test   fast, the rest of those folders, tests/contract over the embedded stores, and SHOWN: what `pytest` runs
    rest   all that `test` leaves, less what is marked `packages`
    all    every test

A path on the command line asks for all that it holds, unless a tier is named too.
"""

import os
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

FAST_FOLDERS = ("tests/unit/", "tests/property/")
SLOW_TO_IMPORT = ("tests/unit/torch/",)
"""The imports of torch and transformers take seconds, in each process."""
TEST_FOLDERS = (*FAST_FOLDERS, "tests/contract/")
SHOWN = (
    "tests/e2e/up/test_shapes_stay.py",
    "tests/e2e/up/test_up_commands.py",
    "tests/e2e/test_openai_client.py",
)
"""Whole suites shown to a newcomer: all commands, all shapes that programs read, OpenAI's own client."""
FEW_EXAMPLES = 30
"""Examples in the fast tier, of Hypothesis's default of 100; properties with another number try that share of it."""
LONGEST_FIRST = (
    *("tests/fuzz/", "tests/e2e/", "tests/faults/", "tests/contract/", "tests/property/"),
    # Unit tests in virtual time or with torch, a minute in a module.
    *("tests/unit/verdict/", "tests/unit/lab/", "tests/unit/torch/", "tests/unit/capacity/"),
)
TIERS = ("fast", "test", "rest", "all")
MAX_WORKERS = 8
NEVER_FAST = ("system", "torch", "slow")
NEVER_TEST = ("kafka", "redis", "alone")
ONLY_IN_ALL = "packages"
"""The mark of tests that need Java, a Redis of the machine's own, or the machine to itself."""

SYSTEM_CALLS = {
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "socket.bind": "binds a port",
}
"""Python's audit events, and their descriptions."""


def tier_of(path: str, marks: Collection[str]) -> str:
    """Return fast, test, rest or all; `path` as in a test's id."""
    if ONLY_IN_ALL in marks:
        return "all"
    by_folder = path.startswith(FAST_FOLDERS) and not path.startswith(SLOW_TO_IMPORT)
    if by_folder and not any(mark in marks for mark in (*NEVER_FAST, *NEVER_TEST)):
        return "fast"
    shown = path.startswith((*TEST_FOLDERS, *SHOWN))
    return "test" if shown and not any(mark in marks for mark in NEVER_TEST) else "rest"


def held_in(requested: str, tier: str) -> bool:
    """Return whether a run of tier `requested` includes the tests of `tier`."""
    return requested in ("all", tier) or (requested == "test" and tier == "fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="which tests: fast, test (as without paths), rest, all")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.tier is None:  # workers of pytest-xdist inherit it from their controller
        paths_named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.tier = "all" if paths_named else "test"
    if not config.getoption("hypothesis_profile", "none"):
        _load_profile(few=config.option.tier == "fast")
    if config.option.tier == "fast" and hasattr(config, "workerinput"):
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # each worker has one core: torch's threads would spin on the others
    sys.addaudithook(_guard)
    _guard_what_audit_does_not_see()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Limit `-n auto`, as each worker starts its own stores."""
    return min(os.cpu_count() or 1, MAX_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.side_by_side import AloneLast  # not where pytest-xdist is not installed

    return AloneLast(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test will run."""
    if config.option.tier not in ("fast", "test") or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return None if held_in(config.option.tier, tier_of(path, ())) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    requested = config.option.tier
    kept, left = [], []
    for item in items:
        tier = tier_of(item.nodeid, {mark.name for mark in item.iter_markers()})
        item.stash[TIER] = tier
        (kept if held_in(requested, tier) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
    if hasattr(config, "workerinput"):
        kept.sort(key=lambda item: _place(item.nodeid))
    items[:] = kept


def _place(path: str) -> int:
    """Return the rank of a module in a parallel run: long ones come first, as the last one would run alone."""
    return next((place for place, folder in enumerate(LONGEST_FIRST) if path.startswith(folder)), len(LONGEST_FIRST))


TIER = pytest.StashKey[str]()


class _Guard:
    """A guard that ends a fast test on a forbidden action; an audit hook, since those see C code too."""

    def __init__(self) -> None:
        self.test = ""
        """The running fast test, if there is one."""
        self.seen = ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        of_a_file = event == "socket.bind" and isinstance(arguments[1], str | bytes)
        if self.test and event in SYSTEM_CALLS and not of_a_file:
            self.stop(SYSTEM_CALLS[event])

    def stop(self, what: str) -> None:
        """Fail the test that runs."""
        self.seen = f"{self.test} {what}: mark it `system` (pytest.mark.system), so that it is not in the fast tier"
        pytest.fail(self.seen, pytrace=False)


_guard = _Guard()


def _load_profile(*, few: bool) -> None:
    """Set the default number of examples of properties, without a deadline, as speed is no property.

    Examples are random, but in CI always the same, since one commit must get one verdict there. Elsewhere each run
    tries others, and failed ones are tried again (.hypothesis), so that many short runs see more than one long one.
    """
    from hypothesis import settings  # not where the engines' own tests run

    share = {"max_examples": FEW_EXAMPLES} if few else {}
    settings.register_profile("fulcrum", settings(deadline=None, print_blob=True, **share))
    settings.load_profile("fulcrum")


def _guard_what_audit_does_not_see() -> None:
    """Guard the ports that gRPC binds in C."""
    from grpc.aio._server import Server

    for name in ("add_insecure_port", "add_secure_port"):
        setattr(Server, name, _guarded(getattr(Server, name), SYSTEM_CALLS["socket.bind"]))
    time.sleep = _guarded(time.sleep, "sleeps")


def _guarded(function: Any, what: str) -> Any:
    def call(*arguments: Any) -> Any:
        if _guard.test and arguments != (0,):  # sleeping for no time lets other threads run
            _guard.stop(what)
        return function(*arguments)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Guard its fixtures too."""
    _guard.test = item.nodeid if item.stash.get(TIER, "") == "fast" else ""
    try:
        return (yield)
    finally:
        _guard.test = ""


def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None:
        _guard.seen = ""  # the report says it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose code took the guard's failure for an error of its own.

    Teardown is not guarded, as it may end stores that earlier tests shared.
    """
    _guard.test = ""
    result = yield
    seen, _guard.seen = _guard.seen, ""
    if seen:
        pytest.fail(seen, pytrace=False)
    return result
