"""The sender of orders to workers. Its calls run concurrently, and no later decision waits for them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final

import structlog

from libs.contracts.errors import FulcrumError, NoWorkers, StaleLead, StaleRole, StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Worker
from libs.runtime.net.access import PLAINTEXT_VARIABLE, TLS_VARIABLES
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport
from libs.worker.admin_client import RoleMove, WorkerAdmin
from services.planner.role_planner import MAX_CALLS, Order

log = structlog.get_logger()

# A call that takes longer is abandoned. Telemetry shows before the next decision whether the worker has changed.
CALL_S: Final = 2.0


class CallOutcome(StrEnum):
    DONE = "done"
    STALE = "stale"
    """The worker had a different assignment or had been restarted."""
    FAILED = "failed"
    LEFT = "left"
    """No call was made: too many calls were in progress, or one to the same worker was."""


Done = Callable[[Order, Assignment | None, bool], None]
"""A callback that receives an order, the worker's assignment after it, and whether the worker could not be reached.

The assignment is None if it has not changed or is unknown.
"""


class OrderExecutor:
    """A sender of orders to workers, with at most one call to each worker at a time."""

    def __init__(
        self,
        transport: Transport,
        tasks: TaskOwner,
        *,
        planner_id: str,
        token: str,
        outrun: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a sender. It calls `outrun` if a worker refuses an order because it has seen a later lead."""
        self._transport = transport
        self._tasks = tasks
        self._planner_id = planner_id
        self._token = token
        self._calling: set[str] = set()
        self.outcomes: Counter[CallOutcome] = Counter()
        self._outrun = outrun

    @property
    def may_ask(self) -> bool:
        """Return whether this planner has the token that workers require for changes."""
        return bool(self._token)

    @property
    def outstanding(self) -> int:
        return len(self._calling)

    def carry_out(self, orders: Iterable[Order], done: Done, *, lead_term: int = 0) -> None:
        """Start the calls and return. `done` is called once for each order in this event loop.

        `lead_term` is the number of the lead under which the orders were decided.
        """
        for order in orders:
            if order.worker.id in self._calling or len(self._calling) >= MAX_CALLS:
                self._end(order, CallOutcome.LEFT, None, done)
                continue
            self._calling.add(order.worker.id)
            self._tasks.spawn(f"change {order.worker.id}", self._call(order, done, lead_term))

    async def _call(self, order: Order, done: Done, lead_term: int) -> None:
        outcome, assignment = CallOutcome.FAILED, None
        try:
            async with asyncio.timeout(CALL_S):
                assignment = (await self._set_role(order, lead_term)).assignment
            outcome = CallOutcome.DONE
        except StaleRole as error:
            outcome = CallOutcome.STALE
            if isinstance(error, StaleLead):
                self._outrun()
            write = log.warning if isinstance(error, StaleLead) else log.info
            write("a worker is not as it was when its change was decided", worker=order.worker.id, error=str(error))
        except (FulcrumError, TimeoutError) as error:
            log.warning("a worker could not be changed", worker=order.worker.id, error=str(error) or "it took too long")
        finally:
            self._calling.discard(order.worker.id)
            self._end(order, outcome, assignment, done)

    async def _set_role(self, order: Order, lead_term: int) -> RoleMove:
        return await self.ask(
            order.worker,
            order.wanted,
            actor=self._planner_id,
            reason=order.reason,
            wait_ms=0,
            own_budget_tokens=order.own_budget_tokens,
            force=True,  # limits say how many are left, and several move at once
            lead_term=lead_term,
        )

    async def ask(
        self,
        worker: Worker,
        wanted: Assignment,
        *,
        actor: str,
        reason: str,
        wait_ms: int,
        own_budget_tokens: int = 0,
        force: bool = False,
        lead_term: int = 0,
    ) -> RoleMove:
        """Set a worker's assignment, and wait at most `wait_ms` until every gateway knows it.

        The epoch of `wanted` must be one more than the worker's present epoch, otherwise raise StaleRole. Raise
        NoWorkers if the worker does not answer. Raise StartupError if the token is missing or may not be sent to the
        worker.
        """
        if not self._token:
            raise StartupError("changing workers needs the suite's token: set FULCRUM_TOKEN or FULCRUM_TOKEN_FILE")
        if not self._transport.metadata(worker.address):
            raise StartupError(
                f"the token would travel to {worker.address} in plaintext: set {TLS_VARIABLES}, or {PLAINTEXT_VARIABLE}"
            )
        try:
            channel = self._transport.channel(worker.address)
        except ValueError as error:
            raise NoWorkers(f"{worker.id} has registered no address that can be called: {error}") from None
        try:
            return await WorkerAdmin(channel, worker.id, self._token).set_role(
                wanted.role,
                wanted.budget_tokens,
                expected_epoch=wanted.epoch - 1,
                incarnation=worker.incarnation,
                actor=actor,
                reason=reason,
                wait_ms=wait_ms,
                own_budget_tokens=own_budget_tokens,
                force=force,
                lead_term=lead_term,
            )
        finally:
            await channel.close()

    def _end(self, order: Order, outcome: CallOutcome, assignment: Assignment | None, done: Done) -> None:
        self.outcomes[outcome] += 1
        done(order, assignment, outcome is CallOutcome.FAILED)
