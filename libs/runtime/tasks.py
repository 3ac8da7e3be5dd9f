"""Owned tasks: every background task has a name and an owner, and one that fails stops its service."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()

OnFailure = Callable[[BaseException], None]

CANCEL_AGAIN_S = 2.0
"""A task that has not ended so long after it was cancelled is cancelled again: Python 3.11's `asyncio.wait_for` loses a
cancellation that comes in the same turn of the loop as what it waits for, and clients of Redis and Kafka call it."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until all have ended, with whatever."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # is thereby not reported as never retrieved


class TaskOwner:
    """Owns background tasks. The first failure is kept in `error` and reported once through `on_failure`."""

    def __init__(self, on_failure: OnFailure | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self.error: BaseException | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as a task of this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def fail(self, error: BaseException, name: str = "part") -> None:
        """A task of this owner, or of a part that looks after its own, has failed: only the first one counts."""
        if self.error is not None:
            return
        self.error = error
        log.error("task failed", task=name, error=repr(error), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs and wait for it; later failures are not reported."""
        self._on_failure = None
        await end(*self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error, task.get_name())


async def until_first(**works: Coroutine[Any, Any, Any]) -> None:
    """Run them together, each under its name, until one ends or fails; the others are cancelled and waited for."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work, name=name) for name, work in works.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(*tasks)
