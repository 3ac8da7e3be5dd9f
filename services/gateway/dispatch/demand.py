"""Publishes cumulative counts of this gateway's arrivals, including refused ones."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from libs.bus.port import Bus
from libs.contracts.errors import FulcrumError, QueueFull, RateLimited
from libs.contracts.topics import DEMAND
from libs.demand.counts import OTHER, ArrivalCounter, DemandKey
from libs.demand.wire import totals_message
from libs.dispatch.generation import ApiFinishReason, Ending, Generation
from libs.runtime.clock import Clock

EVERY_S: Final = 2.0
# Above this the broker counts as away. Counts are cumulative, so one later record replaces those skipped.
MAX_UNSENT: Final = 256
NO_ROOM: Final = frozenset({429, 503})
"""Statuses of arrivals that were refused for want of room rather than for their content."""


class DemandPublisher:
    """The publisher of one gateway's arrival counts."""

    def __init__(self, bus: Bus, gateway_id: str, clock: Clock) -> None:
        self.counter = ArrivalCounter()
        self._bus = bus
        self._clock = clock
        self._gateway = (gateway_id, clock.now_ns())
        self._left = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.publish()

    def leave(self) -> None:
        self.publish(last=True)

    def publish(self, *, last: bool = False) -> None:
        """Publish the current counts, unless the broker is away: a later record includes them."""
        if self._left or (self._bus.stats().buffered > MAX_UNSENT and not last):
            return
        self._left = last
        rows, full = self.counter.rows(), self.counter.queue_full
        self._bus.publish(DEMAND, totals_message(self._gateway, self._clock.now_ns(), rows, full, last=last))

    def arrive(self, tenant: str, service_class: str) -> "DemandArrival":
        """Begin an arrival whose body is still to be read."""
        return DemandArrival(self.counter, self._clock, tenant, service_class)

    def ended(self, generation: Generation, outcome: Ending) -> None:
        """Record the end of a choice. A batch line, which had no arrival, is counted here."""
        if not self.counter.holds(generation):
            context = generation.context
            key = DemandKey(generation.model, context.service_class, context.tenant)
            self.counter.admitted(key, [generation], generation.prompt_tokens, b"", self._clock.now_ns())
        self.counter.ended(generation, well=isinstance(outcome, ApiFinishReason))


@dataclass(slots=True)
class DemandArrival:
    """One request between its arrival and its admission."""

    _counter: ArrivalCounter
    _clock: Clock
    _tenant: str
    _service_class: str
    model: str = OTHER
    choices: int = 1
    _mark: bytes = b""
    _admitted: bool = field(default=False, init=False)

    def read(self, body: bytes) -> bytes:
        """Return the body after noting it, since retries are recognised by it."""
        self._mark = xxhash.xxh3_128_digest(self._tenant.encode() + b"\0" + body)
        return body

    def admitted(self, generations: Sequence[Generation]) -> None:
        """Record that the request's choices wait for workers."""
        tokens = sum(each.prompt_tokens for each in generations)
        self._counter.admitted(self._key, generations, tokens, self._mark, self._clock.now_ns())
        self._admitted = True

    def failed(self, error: FulcrumError) -> None:
        """Record an error as the answer. A refusal for want of room still counts as demand."""
        if error.http_status in NO_ROOM and not isinstance(error, RateLimited):  # which more room would not help
            full = isinstance(error, QueueFull)
            now_ns = self._clock.now_ns()
            self._counter.refused(self._key, self.choices, self._mark, now_ns, known=self._admitted, full=full)

    @property
    def _key(self) -> DemandKey:
        return DemandKey(self.model, self._service_class, self._tenant)
