"""Owned tasks: every background task has a name and an owner, and one that fails stops its service."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

OnFailure = Callable[[BaseException], None]
T = TypeVar("T")

# A cancelled task that has not ended after this long is cancelled again. `asyncio.wait_for` of Python 3.11 loses a
# cancellation that comes in the same turn of the loop as its result, and clients of Redis and Kafka call it.
CANCEL_AGAIN_S = 2.0


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until all have ended, regardless of their results."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        for task in ended:
            retrieve(task)


def retrieve(future: "asyncio.Future[Any]") -> None:
    """Read the error of a finished future, so that asyncio does not report it as never retrieved."""
    if not future.cancelled():
        future.exception()


async def finish(name: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the caller is cancelled, the cancellation is raised once `work` has ended."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(retrieve)  # nobody awaits the task of a cancelled caller
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # `end` repeats its cancellation
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


class TaskOwner:
    """The owner of background tasks. The first failure is kept in `error` and reported once through `on_failure`."""

    def __init__(self, on_failure: OnFailure | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self.error: BaseException | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as a named task of this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def fail(self, error: BaseException, name: str = "part") -> None:
        """Record the failure of a task, or of a part that owns its tasks itself. Only the first failure counts."""
        if self.error is not None:
            return
        self.error = error
        log.error("task failed", task=name, error=repr(error), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel running tasks and wait for them. Later failures are not reported."""
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
    """Run coroutines as tasks, each under its name, until one ends or fails; then cancel the others and wait for
    them.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work, name=name) for name, work in works.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(*tasks)
