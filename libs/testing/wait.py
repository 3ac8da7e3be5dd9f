"""Helpers to wait in tests: for a condition within a bound, and for a coroutine without an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

POLL_S = 0.01


async def until(holds: Callable[[], object], *, timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return once `holds()` is true; raises AssertionError after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not holds():
        assert loop.time() < deadline_s, f"{what} did not come true in {timeout_s} s"
        await asyncio.sleep(POLL_S)


Result = TypeVar("Result")


def at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that only yields turns to others, without an event loop, and return its result."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as ended:
            result: Result = ended.value
            return result
