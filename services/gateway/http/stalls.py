"""Bounds on the time that a request waits for its client, and the reading of its body within them.

One sweep a second checks all waits, in place of a timer for each: an answer waits once per token.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.types import Receive

from libs.contracts.errors import BodyTooLarge, InvalidRequest, QueueFull
from libs.dispatch.ports import OneForAll, Tenancy
from libs.dispatch.waiting import RETRY_AFTER_S
from libs.policy.gateway.places import queue_room

# Waits end at most this long after their limit.
SWEEP_S = 1.0


class Stalled(Exception):
    """The client has left its socket unread for too long."""


class Patience:
    """The current wait for one request's client, with its limit."""

    def __init__(self, task: "asyncio.Task[object]", tenant: str = "") -> None:
        self.tenant = tenant
        self._task = task
        self._loop = task.get_loop()
        self._until_s = 0.0
        self._late: Callable[[], Exception] = Stalled
        self.error: Exception | None = None
        """The error of a wait that was cut short."""
        self.body_bytes = 0
        """The bytes of the request's body that have arrived."""

    def wait(self, limit_s: float, late: Callable[[], Exception]) -> None:
        """Begin a wait for the client, which fails with `late()` after its limit unless `done` is called first."""
        self._until_s = self._loop.time() + limit_s
        self._late = late

    def done(self) -> None:
        self._until_s = 0.0

    def check(self, now_s: float) -> None:
        """Break a wait that is over its limit."""
        if self.error is None and 0 < self._until_s < now_s:
            self.error = self._late()
            self._task.cancel()


class Stalls:
    """All requests that are being read or answered, including those of slow clients.

    Their number is bounded because each may hold an answer that waits to be read. The bytes of their bodies are
    bounded too and count until the answer has ended, since the prompt's tokens take about as much memory as the
    body.
    """

    def __init__(self, most: int, most_body_bytes: int, tenants: Tenancy | None = None) -> None:
        """`tenants`: the tenants that share both bounds, each leaving room to the others; None treats all requests
        alike.
        """
        self._most = most
        self._most_body_bytes = most_body_bytes
        self._tenants = tenants or OneForAll()
        self._watched: set[Patience] = set()
        self._open: Counter[str] = Counter()
        # By tenant, like `_open`.
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def body_bytes(self) -> int:
        return self._bytes.total()

    def check_room(self, tenant: str = "") -> None:
        """Raise QueueFull at the bound for all requests or at the tenant's part of it."""
        if len(self._watched) >= self._most:
            raise QueueFull(f"{self._most} requests are open already", retry_after_s=RETRY_AFTER_S)
        if not self._has_room(self._most, self._open, tenant, 1):
            message = f"{self._open[tenant]} requests of tenant {tenant} are open already: others need room too"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)

    def hold(self, patience: Patience, size_bytes: int) -> None:
        """Count `size_bytes` more of a request's body; raise QueueFull at the bound for all bodies or at its tenant's
        part.
        """
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
        """Yield the current task's waits. A wait that is broken leaves the context as its error."""
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
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.look(loop.time())

    def look(self, now_s: float) -> None:
        """Break the waits whose limit has passed at `now_s`, in the loop's time."""
        for patience in list(self._watched):
            patience.check(now_s)


# Time that a client has to send its whole body.
BODY_TIMEOUT_S = 30.0


class ClientGone(Exception):
    pass


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], max_bytes: int, patience: Patience, stalls: Stalls
) -> bytes:
    """Return the whole body.

    Raise BodyTooLarge or QueueFull without reading further, and ClientGone if the client disconnects. `patience`
    bounds the time, `stalls` the size of all open bodies together.
    """
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
    patience.wait(BODY_TIMEOUT_S, _too_slow)
    parts: list[bytes] = []
    room_bytes = max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        room_bytes -= len(part)
        if room_bytes < 0:
            raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
        stalls.hold(patience, len(part))
        parts.append(part)
        if not message.get("more_body", False):
            patience.done()
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_slow() -> InvalidRequest:
    return InvalidRequest(f"the body did not come within {BODY_TIMEOUT_S:g} s", param="body")
