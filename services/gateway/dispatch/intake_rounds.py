# Each turn of the event loop takes in a few requests, so that workers' frames never wait for many of them.

import asyncio

from libs.contracts.errors import QueueFull
from libs.dispatch.ports import OneForAll, Tenancy
from libs.dispatch.waiting import RETRY_AFTER_S
from libs.policy.limits.intake import MOST_WAITING, IntakeLine, units_of

_ANYBODY = ""


class IntakeRounds:
    """The queue of one gateway's requests over all routes that generate, first come, first served unless tenants take
    turns.
    """

    def __init__(self, tenants: Tenancy | None = None) -> None:
        """`tenants` take turns; None treats all requests alike."""
        self._tenants = tenants or OneForAll()
        self._line = IntakeLine()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._is_due = False

    def __len__(self) -> int:
        """Return the number of requests that wait for their turn."""
        return len(self._waiting)

    async def turn(self, tenant: str, choices: int = 1) -> None:
        """Wait until one of the tenant's requests may be read, or `choices` of it made. Raise QueueFull if too many
        wait.
        """
        told_apart = self._tenants.told_apart
        weight = self._tenants.weight(tenant) if told_apart else 1
        if len(self._waiting) >= MOST_WAITING:
            raise QueueFull(f"{MOST_WAITING} requests wait to be read already", retry_after_s=RETRY_AFTER_S)
        ticket = self._line.enter(tenant if told_apart else _ANYBODY, units_of(choices), weight)
        loop = asyncio.get_running_loop()
        self._round_soon(loop)
        if ticket is None:
            return
        self._waiting[ticket] = waiting = loop.create_future()
        try:
            await waiting
        finally:
            if self._waiting.pop(ticket, None) is not None:  # its client has gone
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
