"""The time in tests: a clock that a test sets, a wait for a condition, and a coroutine without an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ms(self, ms: float) -> None:
        """Move forward by `ms` milliseconds."""
        self._now_ns += int(ms * 1_000_000)


POLL_S = 0.01


async def until(holds: Callable[[], object], *, timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return once `holds()` is true. Raise AssertionError after `timeout_s`."""
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
