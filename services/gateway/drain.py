"""The end of a gateway: what is alive ends first, within bounds."""

import asyncio
from contextlib import suppress

from libs.dispatch.dispatcher import Dispatcher


async def drain(dispatcher: Dispatcher, timeout_s: float) -> None:
    """Take no more, let what is alive end, and fail what has not ended in time."""
    idle = asyncio.Event()
    dispatcher.drain(idle.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await idle.wait()
    dispatcher.stop()
