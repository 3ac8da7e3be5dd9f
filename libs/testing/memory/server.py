"""A store's server in memory, which a test can kill, cut off, freeze and start again like a child process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

Travel = Callable[[], Awaitable[None]]
"""The delivery of a message in one direction."""


class ServerAway(ConnectionError):
    """The server does not exist, or did not answer in time."""


class KillableServer(Protocol):
    """The operations of port tests on a server, whether a child process or in memory."""

    @property
    def runs(self) -> bool:
        """True if the server accepts connections."""
        ...

    def start(self) -> None: ...

    def kill(self) -> None:
        """Stop without notice, as a crash does."""
        ...

    def freeze(self) -> None:
        """Stop answering while connections stay open."""
        ...

    def thaw(self) -> None:
        """Answer again."""
        ...


class Bell:
    """A notification of all waiters.

    News between two waits are not missed, since waiters name the count they have seen.
    """

    def __init__(self) -> None:
        self.rung = 0
        self._waiting: dict[asyncio.Future[None], None] = {}

    def ring(self) -> None:
        self.rung += 1
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            _wake(each)

    async def past(self, seen: int, timeout_s: float | None = None) -> bool:
        """Return True once the count exceeds `seen`; False after `timeout_s`."""
        if self.rung > seen:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = None
        # Not asyncio.timeout, which Python 3.11 lets swallow a cancellation.
        timer = None if timeout_s is None else loop.call_later(max(timeout_s, 0.0), _wake, waiter)
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)
            if timer is not None:
                timer.cancel()
        return self.rung > seen


async def at_once() -> None:
    """Deliver a message without delay."""
    await asyncio.sleep(0)


class MemoryServer:
    """The availability of a store, which all stores share. It runs from the start."""

    def __init__(self, travel: Travel = at_once) -> None:
        self.runs = True
        self.news = Bell()
        """Rung when connections break, and by stores for changes that they push."""
        self._frozen = False
        self._travel = travel
        self._life = 1
        """The number of starts; connections do not outlive one."""

    @property
    def life(self) -> int:
        """A number that differs after each time that connections broke."""
        return self._life

    def start(self) -> None:
        self.runs = True

    def kill(self) -> None:
        """Stop without notice; stores decide what they lose."""
        self.cut_off()

    def cut_off(self) -> None:
        """Reset every connection, and refuse new ones until the next start. The contents stay."""
        self.runs = self._frozen = False
        self._life += 1
        self.news.ring()

    def freeze(self) -> None:
        """Stop answering while connections stay open."""
        self._frozen = True

    def thaw(self) -> None:
        """Answer again."""
        self._frozen = False
        self.news.ring()

    async def call(self, act: Callable[[], T], *, timeout_s: float) -> T:
        """Return the result of `act`, run when the call reaches the server. Raise ServerAway.

        As with any server, `act` may have run although the answer was lost. Unlike with one, a caller that gave up
        while the server was frozen has not run it.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        life = self._life
        if not self.runs:
            await self._travel()
            raise ServerAway("connection refused")
        await self._pass(life, deadline_s)
        answer = act()
        await self._pass(life, deadline_s)
        return answer

    async def _pass(self, life: int, deadline_s: float) -> None:
        """Deliver a message between a caller and the server, unless the connection has broken."""
        await self._travel()
        seen = self.news.rung
        while self._frozen and self._life == life:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise ServerAway("no answer in time")
            await self.news.past(seen, left_s)
            seen = self.news.rung
        if self._life != life:
            raise ServerAway("connection reset")


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
