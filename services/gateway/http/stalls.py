"""Bounds on what a client may make its request wait for: one look a second at all of them in place of a timer for each
wait, of which an answer has one a token."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from libs.contracts.errors import QueueFull
from libs.dispatch.waiting import RETRY_AFTER_S

SWEEP_S = 1.0
"""Waits are ended this much late at most."""


class Stalled(Exception):
    """The client has left its socket unread for too long."""


class Patience:
    """What one request's client is waited for, and until when."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self._task = task
        self._loop = task.get_loop()
        self._until_s = 0.0
        self._late: Callable[[], Exception] = Stalled
        self.error: Exception | None = None
        """Set when a wait was broken."""
        self.body_bytes = 0
        """Bytes of its request's body that have arrived."""

    def wait(self, limit_s: float, late: Callable[[], Exception]) -> None:
        """A wait for the client begins, which ends by `late()` after its limit; `done` ends it in time."""
        self._until_s = self._loop.time() + limit_s
        self._late = late

    def done(self) -> None:
        """The client did its part."""
        self._until_s = 0.0

    def check(self, now_s: float) -> None:
        """Break a wait that is over its limit."""
        if self.error is None and 0 < self._until_s < now_s:
            self.error = self._late()
            self._task.cancel()


class Stalls:
    """All requests that are being read or answered, those of clients that read slowly included: bounded, because each
    may hold an answer that waits to be read, and bounded in the bytes of their bodies. Those count until the answer has
    ended, because what a body becomes, tokens of its prompts, is about as large."""

    def __init__(self, most: int, most_body_bytes: int) -> None:
        self._most = most
        self._most_body_bytes = most_body_bytes
        self._watched: set[Patience] = set()
        self.body_bytes = 0
        """Bytes of all open bodies."""

    def __len__(self) -> int:
        return len(self._watched)

    def check_room(self) -> None:
        """Raises QueueFull at the bound."""
        if len(self._watched) >= self._most:
            raise QueueFull(f"{self._most} requests are open already", retry_after_s=RETRY_AFTER_S)

    def hold(self, patience: Patience, size_bytes: int) -> None:
        """Count `size_bytes` more of a request's body; raises QueueFull at the bound for all bodies."""
        if self.body_bytes + size_bytes > self._most_body_bytes:
            message = f"the bodies of open requests take {self._most_body_bytes} bytes already"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)
        patience.body_bytes += size_bytes
        self.body_bytes += size_bytes

    @contextmanager
    def watched(self) -> Iterator[Patience]:
        """Patience for the current task; a broken wait leaves it as its error."""
        task = asyncio.current_task()
        assert task is not None
        patience = Patience(task)
        self._watched.add(patience)
        try:
            yield patience
        except asyncio.CancelledError:
            if patience.error is None or task.uncancel():
                raise
            raise patience.error from None
        finally:
            self._watched.discard(patience)
            self.body_bytes -= patience.body_bytes

    async def sweep(self) -> None:
        """Break waits that are too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.look(loop.time())

    def look(self, now_s: float) -> None:
        """Break those that are too long at `now_s`, the loop's time."""
        for patience in list(self._watched):
            patience.check(now_s)
