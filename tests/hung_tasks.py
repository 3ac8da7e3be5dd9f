"""A pytest plugin that reports what every asyncio task was waiting for when a test ran into its time limit."""

import asyncio
import gc
from typing import Any

import pytest

MAX_TASKS = 100


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add a section to the report of a test that was ended by pytest-timeout."""
    report = yield
    if call.excinfo is not None and "Timeout" in str(call.excinfo.value):
        report.sections.append(("asyncio tasks that had not ended", "\n".join(_pending())))
    return report


def _pending() -> list[str]:
    tasks = [it for it in gc.get_objects() if isinstance(it, asyncio.Task) and not it.done()]
    return [f"{task.get_name()}: {' > '.join(_awaited(task.get_coro()))}" for task in tasks[:MAX_TASKS]]


def _awaited(waiting: Any) -> list[str]:
    """Return what a coroutine awaits, outermost first; the last is a future or another object not written in Python."""
    found = []
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        name = getattr(waiting, "__qualname__", None) or repr(waiting)
        found.append(f"{name}:{frame.f_lineno}" if frame else name)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return found
