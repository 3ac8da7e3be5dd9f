"""A store's server in memory: it can be killed, cut off, frozen and started again, as a child process can."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

Travel = Callable[[], Awaitable[None]]
"""One way of a message over the network."""


class ServerAway(ConnectionError):
    """There is no server, or it did not answer in time."""


class KillableServer(Protocol):
    """What the tests of a port do to a server, whether it is a child process or in memory."""

    @property
    def runs(self) -> bool:
        """True if it can be connected to."""
        ...

    def start(self) -> None:
        """Start, or start again."""
        ...

    def kill(self) -> None:
        """As a crash would."""
        ...

    def freeze(self) -> None:
        """Stop it answering while its connections stay open."""
        ...

    def thaw(self) -> None:
        """Let it go on."""
        ...


class Bell:
    """Wakes everybody who waits for news. News between two waits are not missed: who waits names what it has heard."""

    def __init__(self) -> None:
        self.rung = 0
        self._waiting: dict[asyncio.Future[None], None] = {}

    def ring(self) -> None:
        """There are news."""
        self.rung += 1
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            _wake(each)

    async def past(self, heard: int, timeout_s: float | None = None) -> bool:
        """Return True once it has been rung more often than `heard`; False after `timeout_s`."""
        if self.rung > heard:
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
        return self.rung > heard


async def at_once() -> None:
    """A network without delay."""
    await asyncio.sleep(0)


class MemoryServer:
    """The part that all stores share: whether it answers. It runs from the start."""

    def __init__(self, travel: Travel = at_once) -> None:
        self.runs = True
        self.news = Bell()
        """Rung when a connection breaks, and by stores for changes that they push."""
        self._frozen = False
        self._travel = travel
        self._life = 1
        """How often it has been started: connections do not outlive one."""

    @property
    def life(self) -> int:
        """Another number after each time that connections broke."""
        return self._life

    def start(self) -> None:
        """Take connections again."""
        self.runs = True

    def kill(self) -> None:
        """As a crash would; what it holds is the store's own affair."""
        self.cut_off()

    def cut_off(self) -> None:
        """Nobody reaches it until it is started, and every connection is reset. It keeps what it holds."""
        self.runs = self._frozen = False
        self._life += 1
        self.news.ring()

    def freeze(self) -> None:
        """Stop it answering while its connections stay open."""
        self._frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        self._frozen = False
        self.news.ring()

    async def call(self, act: Callable[[], T], *, timeout_s: float) -> T:
        """What `act` gives, at the moment when the call comes to the server; raises ServerAway. As with any server, it
        may have acted though the answer was lost. One difference: a caller that gave up while the server was frozen has
        not asked."""
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
        """One way, between a caller and a server that still has the connection."""
        await self._travel()
        heard = self.news.rung
        while self._frozen and self._life == life:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise ServerAway("no answer in time")
            await self.news.past(heard, left_s)
            heard = self.news.rung
        if self._life != life:
            raise ServerAway("connection reset")


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
