"""What the admin verbs share: who may change what the planner does; what they set is published and remembered."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from libs.bus.port import Bus
from libs.contracts.errors import Conflict
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.topics import DECISIONS
from libs.keys.audit import named_actor
from libs.keys.book import Role
from libs.keys.change_guard import ChangeGuard
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from services.planner.kept import Lead, PlannerStore
from services.planner.state import PlannerState

Write = Callable[[PlannerStore], Awaitable[bool]]
"""Keeps a value in a store; whether that worked."""


class Admin:
    """One planner as its admin verbs see it."""

    def __init__(
        self,
        state: PlannerState,
        store: PlannerStore | None,
        bus: Bus,
        clock: Clock,
        *,
        token: str,
        keys: KeyTable | None = None,
    ) -> None:
        """keys: an API key of the role that a verb needs counts as the token does."""
        self._guard = ChangeGuard(keys, clock, token=token)
        self.state = state
        self._store = store
        self._bus = bus
        self._clock = clock

    def allow(
        self, request: Request, authorization: str, what: str, *, said: str = "", least: Role = "operator"
    ) -> str:
        """Return the actor as every record of the change names it; `said` is the name that the caller gives itself.

        Raises what ChangeGuard raises for who may not; Conflict where another planner decides, since what is set here
        would change nothing.
        """
        caller = self._guard.admit(authorization, what, least)
        if self.state.lead is Lead.ANOTHERS:
            raise Conflict("another planner of this cluster leads: ask that one")
        return named_actor(request.scope, caller, said)

    def tell(self, decide: Callable[[int], Decision]) -> None:
        """Publish what was set; `decide` takes the time."""
        self._bus.publish(DECISIONS, decide(self._clock.now_ns()))

    def remembered(self) -> "Remembered":
        """A value of its own in the store."""
        return Remembered(self._store)


class Remembered:
    """Whether the store has what was set last."""

    def __init__(self, store: PlannerStore | None) -> None:
        self._store = store
        self._unkept: Write | None = None
        self.kept = True

    async def keep(self, write: Write) -> None:
        """Keep a value; where the store is away, `again` does."""
        self._unkept = write
        self.kept = self._store is not None and await write(self._store)

    async def again(self) -> bool:
        """Keep what was set while the store was away; whether it has it now."""
        if not self.kept and self._store is not None and self._unkept is not None:
            self.kept = await self._unkept(self._store)
        return self.kept

    def taken(self) -> None:
        """What the store has was taken in place of what was set."""
        self.kept = True
