"""An asyncio event loop in virtual time, shared by processes that a test can kill and freeze.

Every callback belongs to the node whose context scheduled it. Callbacks of one node run in asyncio's own order, on
which programs may rely. A seeded choice decides which node runs next, since no program may rely on an order between
nodes. Time stands still while any node can run, then jumps to the next timer. See docs/adr/0015.
"""

import asyncio
import contextvars
import gc
import heapq
import io
import os
import random as global_random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack
from unittest.mock import patch

import structlog

# The upper bound of turns at one point in time. A loop that exceeds it never waits.
MAX_IDLE_TURNS = 2_000_000
MAX_CANCELS = 5
BURY_S = 30.0

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


class Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.dead = False
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(_node.set, self)

    def __repr__(self) -> str:
        return self.name


_node: contextvars.ContextVar[Node | None] = contextvars.ContextVar("node", default=None)


def current_node() -> Node | None:
    """Return the node whose code runs; None outside all nodes."""
    return _node.get()


class Stuck(Exception):
    """An error for a run in which nothing can run and no timer is left, or in which time no longer passes."""


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, coro: Any, *, loop: "SimLoop", context: contextvars.Context | None = None) -> None:
        self.number = next(loop.numbers)
        super().__init__(coro, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """An event loop without threads and sockets. Executors run their work at once, and there is no selector."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.numbers = count(1)
        self.world = contextvars.Context()
        self.turns = 0
        self._random = random
        self._now_s = 0.0
        self._outside = Node("world")
        self._nodes: list[Node] = [self._outside]
        self._turns_at_now = 0
        self.set_task_factory(self._make_task)

    def add(self, node: Node) -> None:
        """Allow a node to run from now on."""
        self._nodes.append(node)

    def kill(self, node: Node) -> None:
        """Never run the node's callbacks again, not even cleanup. Its tasks remain for `bury`."""
        node.dead = True

    async def bury(self, nodes: list[Node]) -> None:
        """Cancel the tasks that killed processes left, and wait for their ends, since Python warns of pending tasks."""
        for node in nodes:
            node.dead = node.frozen = False
        tasks = [task for node in nodes for task in node.tasks if not task.done()]
        for _ in range(MAX_CANCELS):
            for task in tasks:
                task.cancel()
            if not tasks:
                break
            _, left = await asyncio.wait(tasks, timeout=BURY_S)
            tasks = sorted(left, key=hash)

    def time(self) -> float:
        return self._now_s

    def spawn(self, node: Node, work: Any) -> "asyncio.Task[Any]":
        return node.context.copy().run(self.create_task, work)

    def after(self, delay_s: float, act: Callable[..., object], *args: Any) -> None:
        """Run `act` after a delay, outside any node, so that it runs even if the caller's process has died."""
        self.call_at(self._now_s + delay_s, act, *args, context=self.world)

    def run_in_executor(
        self, executor: Any, func: Callable[[Unpack[_Args]], _Result], *args: *_Args
    ) -> "asyncio.Future[_Result]":
        # The work runs at once in this thread, because the timing of threads cannot be replayed.
        future: asyncio.Future[_Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # the caller gets any error
            future.set_exception(error)
        return future

    def _make_task(self, loop: Any, coro: Any, context: contextvars.Context | None = None) -> "asyncio.Task[Any]":
        task = _Task(coro, loop=self, context=context)
        node = _node.get() if context is None else context.get(_node)
        if node is not None:
            node.tasks.append(task)
            if len(node.tasks) > 2048:
                node.tasks = [task for task in node.tasks if not task.done()]
        return task

    def _run_once(self) -> None:
        self._sort(self._ready)  # type: ignore[attr-defined]
        runnable = [node for node in self._nodes if node.ready and not (node.frozen or node.dead)]
        if not runnable:
            self._advance()
            return
        self._turns_at_now += 1
        if self._turns_at_now > MAX_IDLE_TURNS:
            raise Stuck(f"time has stopped at {self._now_s} s: {runnable}")
        self.turns += 1
        node = runnable[0] if len(runnable) == 1 else runnable[int(self._random.random() * len(runnable))]
        ready = node.ready
        for _ in range(len(ready)):  # one turn of the node's loop
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
            if node.frozen or node.dead or not ready:
                break

    def _sort(self, handles: "deque[asyncio.Handle]") -> None:
        while handles:
            handle = handles.popleft()
            node = handle._context.get(_node) or self._outside  # type: ignore[attr-defined]
            node.ready.append(handle)

    def _advance(self) -> None:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
        if not scheduled:
            raise Stuck(f"nothing is left to do at {self._now_s} s")
        self._now_s = max(self._now_s, scheduled[0].when())
        self._turns_at_now = 0
        while scheduled and scheduled[0].when() <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            if not handle._cancelled:
                self._ready.append(handle)  # type: ignore[attr-defined]

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...


@contextmanager
def replayable(seed: int) -> Iterator[SimLoop]:
    """Yield a loop whose run depends only on the seed. Drop the services' logs in the meantime."""
    global_random.seed(seed)
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    gc.disable()  # finalizers would run at random moments
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            yield SimLoop(Random(f"{seed} turns"))
    finally:
        gc.enable()
        gc.collect()
        structlog.reset_defaults()


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent
