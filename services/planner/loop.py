"""The planner's loops: what it hears, and a decision every period."""

import asyncio
from typing import Final

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_OFF
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import DECISIONS, STEPS
from libs.registry.port import Registry
from libs.runtime.clock import Clock
from services.planner.state import PlannerState

REGISTRY_POLL_MS: Final = 1_000
REST_S: Final = 1.0
"""From one decision about a cluster at rest to the next, which says the same; those who read them know by it that the
planner lives."""


async def follow_workers(registry: Registry, bus: Bus, state: PlannerState, clock: Clock) -> None:
    """Keep the list of workers, and publish role moves; an outage leaves the last list in place."""
    async for workers in registry.watch(poll_ms=REGISTRY_POLL_MS):
        for moved in state.take_workers(workers, clock.now_ns()):
            bus.publish(DECISIONS, moved)


async def follow_telemetry(bus: Bus, state: PlannerState, clock: Clock) -> None:
    """Enter step telemetry from now on; ends with the bus."""
    async for record in bus.subscribe((STEPS,)):
        if isinstance(record.value, StepBatch):
            state.take_batch(record.value, clock.now_ns())


async def decide_forever(bus: Bus, state: PlannerState, clock: Clock, *, period_s: float) -> None:
    """Decide and publish every period, except while the mode is off, and of a cluster at rest every `REST_S`. A late
    round is not made up for."""
    loop = asyncio.get_running_loop()
    due_s = decided_s = loop.time()
    while True:
        # Rounds come on a beat of periods: half of one is what they may be off.
        if state.identity.mode != MODE_OFF and not (state.at_rest and loop.time() < decided_s + REST_S - period_s / 2):
            bus.publish(DECISIONS, state.decide(clock.now_ns()))
            decided_s = loop.time()
        due_s = max(due_s + period_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
