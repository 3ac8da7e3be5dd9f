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
LOOK_S: Final = 0.05
"""While requests are here: who moves workers wants to hear at once of a queue that grows."""
GROWN: Final = 1.25
"""By so much since it was told last, a queue is told again before its time."""
EVERY_NS: Final = 180_000_000
"""Between looks that are `EVERY_S` apart, with what timers are off."""
EMPTY_EVERY_NS: Final = 500_000_000
"""At the first round after so long it is told again that nothing waits: readers give a silent gateway 2 s."""
MAX_MODELS: Final = 64
MAX_UNSENT: Final = 256
"""Records that the broker has not taken: with more, it is away, and what waits now is of no use later. Events of
requests keep their room in the buffer."""


class QueueTeller:
    """One gateway's voice."""

    def __init__(
        self, bus: Bus, queues: Callable[[], list[Queue]], live: Callable[[], int], gateway_id: str, clock: Clock
    ) -> None:
        """`live`: requests that have not ended."""
        self._bus = bus
        self._live = live
        self._told_tokens = 0
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
            since_ns = self._clock.now_ns() - self._told_ns
            due = since_ns >= (EVERY_NS if queues or self._told_waiting else EMPTY_EVERY_NS)
            if due or _tokens(queues) > GROWN * self._told_tokens:
                self.tell(queues)
            await asyncio.sleep(LOOK_S if self._live() else EVERY_S)

    def leave(self) -> None:
        """Say that nothing comes after this."""
        self.tell([], last=True)

    def tell(self, queues: list[Queue], *, last: bool = False) -> None:
        """What waits now, unless the broker is away."""
        if self._left or self._bus.stats().buffered > MAX_UNSENT:
            return
        self._left = last
        self._told_waiting, self._told_ns = bool(queues), self._clock.now_ns()
        self._told_tokens = _tokens(queues)
        message = GatewayQueues(
            gateway_id=self._gateway_id,
            incarnation=self._began_ns,
            told_unix_ns=self._told_ns,
            queues=[ModelQueue(**asdict(queue)) for queue in queues[:MAX_MODELS]],
            last=last,
        )
        self._bus.publish(QUEUES, message)


def _tokens(queues: list[Queue]) -> int:
    return sum(each.prefill_tokens + each.decode_prompt_tokens for each in queues)
