"""Tells telemetry what arrives here, as it arrives: cumulative counts of all arrivals, refused ones included."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from libs.bus.port import Bus
from libs.contracts.errors import FulcrumError, QueueFull, RateLimited
from libs.contracts.topics import DEMAND
from libs.demand.arrivals import ArrivalCounter
from libs.demand.counts import OTHER, DemandKey
from libs.demand.wire import totals_message
from libs.dispatch.generation import ApiFinishReason, Ending, Generation
from libs.runtime.clock import Clock

EVERY_S: Final = 2.0
MAX_UNSENT: Final = 256
"""Records that the broker has not taken: with more it is away, and one record later says the same."""
NO_ROOM: Final = frozenset({429, 503})
"""Statuses of arrivals that were turned away for want of room, not for what they ask."""


class DemandTeller:
    """One gateway's count of arrivals."""

    def __init__(self, bus: Bus, gateway_id: str, clock: Clock) -> None:
        self.counter = ArrivalCounter()
        self._bus = bus
        self._clock = clock
        self._gateway = (gateway_id, clock.now_ns())
        self._left = False

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.tell()

    def leave(self) -> None:
        """Say the last count."""
        self.tell(last=True)

    def tell(self, *, last: bool = False) -> None:
        """The counts as of now, unless the broker is away: what is not said now is in what is said later."""
        if self._left or (self._bus.stats().buffered > MAX_UNSENT and not last):
            return
        self._left = last
        rows, full = self.counter.rows(), self.counter.queue_full
        self._bus.publish(DEMAND, totals_message(self._gateway, self._clock.now_ns(), rows, full, last=last))

    def visit(self, tenant: str, service_class: str) -> "Visit":
        """An arrival whose body is still to be read."""
        return Visit(self.counter, self._clock, tenant, service_class)

    def ended(self, generation: Generation, outcome: Ending) -> None:
        """A choice has ended. One that came without a visit, a line of a batch job, counts now."""
        if not self.counter.holds(generation):
            context = generation.context
            key = DemandKey(generation.model, context.service_class, context.tenant)
            self.counter.admitted(key, [generation], generation.prompt_tokens, b"", self._clock.now_ns())
        self.counter.ended(generation, well=isinstance(outcome, ApiFinishReason))


@dataclass(slots=True)
class Visit:
    """One request on its way in."""

    _counter: ArrivalCounter
    _clock: Clock
    _tenant: str
    _service_class: str
    model: str = OTHER
    choices: int = 1
    _mark: bytes = b""
    _admitted: bool = field(default=False, init=False)

    def read(self, body: bytes) -> bytes:
        """Note the body, by which a retry is known."""
        self._mark = xxhash.xxh3_128_digest(self._tenant.encode() + b"\0" + body)
        return body

    def admitted(self, generations: Sequence[Generation]) -> None:
        """Its choices wait for workers."""
        tokens = sum(each.prompt_tokens for each in generations)
        self._counter.admitted(self._key, generations, tokens, self._mark, self._clock.now_ns())
        self._admitted = True

    def failed(self, error: FulcrumError) -> None:
        """It was answered with an error; one for want of room is demand all the same."""
        if error.http_status in NO_ROOM and not isinstance(error, RateLimited):  # which more room would not help
            full = isinstance(error, QueueFull)
            now_ns = self._clock.now_ns()
            self._counter.refused(self._key, self.choices, self._mark, now_ns, known=self._admitted, full=full)

    @property
    def _key(self) -> DemandKey:
        return DemandKey(self.model, self._service_class, self._tenant)
