"""Bounds on what a client may make its request wait for: one look a second at all of them in place of a timer for each
wait, of which an answer has one a token."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from libs.contracts.errors import QueueFull
from libs.dispatch.ports import OneForAll, Tenancy
from libs.dispatch.waiting import RETRY_AFTER_S
from libs.policy.gateway.places import queue_room

SWEEP_S = 1.0
"""Waits are ended this much late at most."""


class Stalled(Exception):
    """The client has left its socket unread for too long."""


class Patience:
    """What one request's client is waited for, and until when."""

    def __init__(self, task: "asyncio.Task[object]", tenant: str = "") -> None:
        self.tenant = tenant
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

    def __init__(self, most: int, most_body_bytes: int, tenants: Tenancy | None = None) -> None:
        """tenants: who share both bounds, so that each leaves room to others; None: all requests are alike."""
        self._most = most
        self._most_body_bytes = most_body_bytes
        self._tenants = tenants or OneForAll()
        self._watched: set[Patience] = set()
        self._open: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        """Of open bodies, by tenant, as `_open` is."""

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def body_bytes(self) -> int:
        """Bytes of all open bodies."""
        return self._bytes.total()

    def check_room(self, tenant: str = "") -> None:
        """Raises QueueFull at the bound, or at the tenant's part of it."""
        if len(self._watched) >= self._most:
            raise QueueFull(f"{self._most} requests are open already", retry_after_s=RETRY_AFTER_S)
        if not self._has_room(self._most, self._open, tenant, 1):
            message = f"{self._open[tenant]} requests of tenant {tenant} are open already: others need room too"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)

    def hold(self, patience: Patience, size_bytes: int) -> None:
        """Count `size_bytes` more of a request's body; raises QueueFull at the bound for all bodies, or at its tenant's
        part of that."""
        if self.body_bytes + size_bytes > self._most_body_bytes:
            message = f"the bodies of open requests take {self._most_body_bytes} bytes already"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)
        others_bytes = self._bytes[patience.tenant] - patience.body_bytes  # one body alone may be of any size
        if others_bytes and not self._has_room(self._most_body_bytes, self._bytes, patience.tenant, size_bytes):
            held = self._bytes[patience.tenant]
            message = f"the bodies of open requests of tenant {patience.tenant} take {held} bytes already"
            raise QueueFull(f"{message}: others need room too", retry_after_s=RETRY_AFTER_S)
        patience.body_bytes += size_bytes
        self._bytes[patience.tenant] += size_bytes

    def _has_room(self, most: int, taken: Counter[str], tenant: str, more: int) -> bool:
        if not self._tenants.told_apart:
            return True
        return queue_room(most, taken.total(), taken[tenant], self._tenants.weight(tenant)) >= more

    @contextmanager
    def watched(self, tenant: str = "") -> Iterator[Patience]:
        """Patience for the current task; a broken wait leaves it as its error."""
        task = asyncio.current_task()
        assert task is not None
        patience = Patience(task, tenant)
        self._watched.add(patience)
        self._open[tenant] += 1
        try:
            yield patience
        except asyncio.CancelledError:
            if patience.error is None or task.uncancel():
                raise
            raise patience.error from None
        finally:
            self._watched.discard(patience)
            for counts, less in ((self._open, 1), (self._bytes, patience.body_bytes)):
                counts[tenant] -= less
                if not counts[tenant]:
                    del counts[tenant]

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
