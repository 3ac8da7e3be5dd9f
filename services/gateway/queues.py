"""Tells telemetry what waits here: workers hold no more than their credits, so queues are mostly at gateways."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue
from libs.contracts.topics import QUEUES
from libs.policy.gateway.queues import Queue
from libs.runtime.clock import Clock

EVERY_S: Final = 0.2
EMPTY_EVERY_NS: Final = 500_000_000
"""At the first round after so long it is told again that nothing waits: readers give a silent gateway 2 s."""
MAX_MODELS: Final = 64
MAX_UNSENT: Final = 256
"""Records that the broker has not taken: with more, it is away, and what waits now is of no use later. Events of
requests keep their room in the buffer."""


class QueueTeller:
    """One gateway's voice."""

    def __init__(self, bus: Bus, queues: Callable[[], list[Queue]], gateway_id: str, clock: Clock) -> None:
        self._bus = bus
        self._queues = queues
        self._gateway_id = gateway_id
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._left = False
        self._told_waiting = True
        """Whether the last message said that anything waits; before the first, what waits is not known."""
        self._told_ns = 0

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            queues = self._queues()
            if queues or self._told_waiting or self._clock.now_ns() >= self._told_ns + EMPTY_EVERY_NS:
                self.tell(queues)
            await asyncio.sleep(EVERY_S)

    def leave(self) -> None:
        """Say that nothing comes after this."""
        self.tell([], last=True)

    def tell(self, queues: list[Queue], *, last: bool = False) -> None:
        """What waits now, unless the broker is away."""
        if self._left or self._bus.stats().buffered > MAX_UNSENT:
            return
        self._left = last
        self._told_waiting, self._told_ns = bool(queues), self._clock.now_ns()
        message = GatewayQueues(
            gateway_id=self._gateway_id,
            incarnation=self._began_ns,
            told_unix_ns=self._told_ns,
            queues=[ModelQueue(**asdict(queue)) for queue in queues[:MAX_MODELS]],
            last=last,
        )
        self._bus.publish(QUEUES, message)
