"""The planner's loops: one follows workers, one telemetry, one renews the lead, and one decides every period."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_OFF
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads, GatewayQueues
from libs.contracts.topics import CAPACITY, DECISIONS, LOADS, QUEUES
from libs.policy.planner.limits import is_due
from libs.runtime.clock import Clock
from libs.stores.registry import Registry
from services.planner.inputs.plans import ReceivedPlans
from services.planner.kept import LEASE_MS, Lead, PlannerStore
from services.planner.orders import Order, OrderExecutor
from services.planner.state import PlannerState

REGISTRY_POLL_MS: Final = 1_000
LEAST_S: Final = 0.02
# After a decision the loop rests at least this many times the decision's duration, but no longer than a period. It
# bounds what decisions made on news can cost.
LEAST_REST: Final = 9
LEAD_EVERY_S: Final = LEASE_MS / 4000


async def follow_workers(registry: Registry, bus: Bus, state: PlannerState, clock: Clock) -> None:
    """Update the list of workers and publish role moves. An outage leaves the last list in place."""
    async for workers in registry.watch(poll_ms=REGISTRY_POLL_MS):
        for moved in state.take_workers(workers, clock.now_ns()):
            bus.publish(DECISIONS, moved)


async def follow_telemetry(
    bus: Bus, state: PlannerState, clock: Clock, news: asyncio.Event, plans: ReceivedPlans
) -> None:
    """Record worker loads, gateway queues and capacity plans published from now on.

    Returns when the bus closes. Sets `news` when more work waits at gateways than before.
    """
    async for record in bus.subscribe((LOADS, QUEUES, CAPACITY)):
        if isinstance(record.value, FleetLoads):
            state.take_loads(record.value, clock.now_ns())
        elif isinstance(record.value, GatewayQueues) and state.take_queues(record.value, clock.now_ns()):
            news.set()
        elif isinstance(record.value, CapacityPlan):
            plans.take(record.value)


class LeaderLease:
    """The planner's view of the leader lease, which is lost if it cannot be renewed in time."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._until_s = float("inf")
        self.fault = ""
        """Why the leader is unknown; empty while it is known."""

    def take(self, found: Lead, asked_s: float, fault: str = "") -> None:
        """Record the store's answer. If it gave none, the last answer holds until the lease expires."""
        self.fault = fault
        if found is not Lead.UNKNOWN:
            self._lead, self._until_s = found, asked_s + LEASE_MS / 1000

    def at(self, now_s: float) -> Lead:
        """Return who leads at `now_s`, as far as that is known."""
        lost = self._lead is Lead.OURS and now_s >= self._until_s
        return Lead.UNKNOWN if lost else self._lead


async def lead_forever(
    store: PlannerStore, state: PlannerState, lease: LeaderLease, settle: Callable[[], Awaitable[bool]]
) -> None:
    """Acquire the lead when it is free, renew it, and release it on cancellation.

    `settle` reconciles stored and effective settings. It runs when this planner gains the lead and on every round
    in which another leads. Nothing is decided until it has succeeded.
    """
    loop = asyncio.get_running_loop()
    who = f"{state.identity.planner_id} {state.identity.incarnation}"
    try:
        while True:
            asked_s, before = loop.time(), lease.at(loop.time())
            found = await store.lead(who)
            settled = found is Lead.UNKNOWN or found is before is Lead.OURS or await settle()
            fault = store.lead_fault if settled else "what the planners keep in Redis cannot be read"
            lease.take(found if settled else Lead.UNKNOWN, asked_s, fault)
            await asyncio.sleep(LEAD_EVERY_S)
    finally:
        await store.follow(who)


async def decide_forever(
    bus: Bus,
    state: PlannerState,
    clock: Clock,
    *,
    period_s: float,
    lease: LeaderLease,
    news: asyncio.Event,
    actor: OrderExecutor | None = None,
) -> None:
    """Decide and publish every period while the mode is not off, and less often for a cluster at rest.

    News triggers a decision at once. A late round is not made up for. `actor` carries orders out in the background.
    """
    loop = asyncio.get_running_loop()
    due_s = decided_s = loop.time()
    rest_s = LEAST_S

    def done(order: Order, assignment: Assignment | None, failed: bool) -> None:
        state.done(order, assignment, clock.now_ns(), failed=failed)

    while True:
        began_s = loop.time()
        heard = news.is_set()
        news.clear()
        state.lead, state.lead_fault = lease.at(began_s), lease.fault
        decides = state.identity.mode != MODE_OFF and state.lead is not Lead.ANOTHERS
        due = is_due(at_rest=state.at_rest, since_s=began_s - decided_s, period_s=period_s)
        if decides and (due or heard):
            decided = state.decide(clock.now_ns())
            for decision in decided.decisions:
                bus.publish(DECISIONS, decision)
            if actor is not None:
                actor.carry_out(decided.orders, done)
            decided_s = began_s if decided.decisions else decided_s
            rest_s = min(max(LEAST_S, (loop.time() - began_s) * LEAST_REST), period_s)
        if loop.time() >= due_s:  # not where news came before
            due_s = max(due_s + period_s, loop.time())
        await asyncio.sleep(rest_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await news.wait()
