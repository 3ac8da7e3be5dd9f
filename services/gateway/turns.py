"""The queues in which requests wait to be read and wait for slots that tenants share fairly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from libs.contracts.errors import QueueFull
from libs.dispatch.generation import RETRY_AFTER_S
from libs.dispatch.ports import OneForAll, Tenancy
from libs.policy.gateway.fairness import ANYBODY, MOST_WAITING, IntakeLine, SlotLine, units_of


class FairSlots:
    """A limited number of slots in one process.

    `libs/policy/gateway/fairness.py` decides which waiting request is next.
    """

    def __init__(
        self,
        slots: int,
        max_waiting: int,
        full: str,
        *,
        tenants: Tenancy | None = None,
        shared: bool = True,
        max_wait_s: float | None = None,
    ) -> None:
        """Create the slots. `full` is the message of the error raised when too many requests wait.

        `shared` is passed to SlotLine. A `max_wait_s` of None leaves the wait unbounded, for slots that are released
        within moments.
        """
        self._line = SlotLine(slots, max_waiting, shared=shared)
        self._full = full
        self._tenants = tenants or OneForAll()
        self._max_wait_s = max_wait_s
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def held(self) -> int:
        return self._line.held

    @asynccontextmanager
    async def slot(self, tenant: str, cost: int = 1) -> AsyncIterator[None]:
        """Wait for the tenant's turn and hold a slot within the context.

        Raise QueueFull if too many requests wait or the wait takes too long.
        """
        are_distinct = self._tenants.are_distinct
        name, weight = (tenant, self._tenants.weight(tenant)) if are_distinct else (ANYBODY, 1)
        if not self._line.take(name, weight):
            if not self._line.has_room(name, weight):
                self._refuse()
            await self._granted(self._line.wait(name, cost, weight), name)
        try:
            yield
        finally:
            self._give_back(name)

    async def _granted(self, ticket: int, tenant: str) -> None:
        self._waiting[ticket] = waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting
        except BaseException as error:
            if self._waiting.pop(ticket, None) is not None:
                self._line.leave(ticket)
            else:  # the slot was granted just as its request was given up
                self._give_back(tenant)
            if isinstance(error, TimeoutError):
                self._refuse()
            raise

    def _give_back(self, tenant: str) -> None:
        self._line.done(tenant)
        for ticket in self._line.next():
            waiting = self._waiting.pop(ticket)
            if not waiting.done():
                waiting.set_result(None)

    def _refuse(self) -> NoReturn:
        raise QueueFull(self._full, retry_after_s=RETRY_AFTER_S)


class IntakeRounds:
    """The queue of requests that wait to be read, over all generating routes of one gateway.

    It is first come, first served unless tenants take turns.
    """

    def __init__(self, tenants: Tenancy | None = None) -> None:
        """Create the queue; with `tenants` of None, all requests are treated alike."""
        self._tenants = tenants or OneForAll()
        self._line = IntakeLine()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, tenant: str, choices: int = 1) -> None:
        """Wait for the tenant's turn to have a request read, or to have `choices` of it created.

        Raise QueueFull if too many requests wait.
        """
        are_distinct = self._tenants.are_distinct
        weight = self._tenants.weight(tenant) if are_distinct else 1
        if len(self._waiting) >= MOST_WAITING:
            raise QueueFull(f"{MOST_WAITING} requests wait to be read already", retry_after_s=RETRY_AFTER_S)
        ticket = self._line.enter(tenant if are_distinct else ANYBODY, units_of(choices), weight)
        loop = asyncio.get_running_loop()
        self._round_soon(loop)
        if ticket is None:
            return
        self._waiting[ticket] = waiting = loop.create_future()
        try:
            await waiting
        finally:
            if self._waiting.pop(ticket, None) is not None:  # its client has left
                self._line.leave(ticket)

    def _round_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        for ticket in self._line.next_round():
            waiting = self._waiting.pop(ticket)
            if not waiting.done():
                waiting.set_result(None)
        if not self._line.is_fresh:
            self._round_soon(loop)
