"""Waiting in tests for what must come true, with a bound instead of a fixed sleep."""

import asyncio
from collections.abc import Callable

POLL_S = 0.01


async def until(holds: Callable[[], object], *, timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return once `holds()` is true; raises AssertionError after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not holds():
        assert loop.time() < deadline_s, f"{what} did not come true in {timeout_s} s"
        await asyncio.sleep(POLL_S)
