"""Publishes the queues of this gateway. Workers hold no more than their credits, so requests wait mostly here."""

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
# Interval between checks while requests are live: the planner needs to see a growing queue at once.
LOOK_S: Final = 0.05
# A queue that grew by this factor since its last report is reported at once.
GROWN: Final = 1.25
# Reports are due after this long: `EVERY_S` less the error of timers.
EVERY_NS: Final = 180_000_000
# An empty queue is reported again after this long: readers count a gateway as silent after 2 s.
EMPTY_EVERY_NS: Final = 500_000_000
MAX_MODELS: Final = 64
# Above this the broker counts as away and reports are dropped: they would be useless later, and the buffer keeps
# its room for request events.
MAX_UNSENT: Final = 256


class QueueReporter:
    """The publisher of one gateway's queues to the topic `queues.v1`."""

    def __init__(
        self, bus: Bus, queues: Callable[[], list[Queue]], live: Callable[[], int], gateway_id: str, clock: Clock
    ) -> None:
        """`live` returns the number of requests that have not ended."""
        self._bus = bus
        self._live = live
        self._reported_tokens = 0
        self._queues = queues
        self._gateway_id = gateway_id
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._left = False
        self._reported_waiting = True
        """Whether the last report had queues; True before the first report."""
        self._reported_ns = 0

    async def run(self) -> None:
        while True:
            queues = self._queues()
            since_ns = self._clock.now_ns() - self._reported_ns
            waits = self._reported_waiting or any(each.waits for each in queues)
            due = since_ns >= (EVERY_NS if waits else EMPTY_EVERY_NS)
            if due or _tokens(queues) > GROWN * self._reported_tokens:
                self.report(queues)
            await asyncio.sleep(LOOK_S if self._live() else EVERY_S)

    def leave(self) -> None:
        self.report([], last=True)

    def report(self, queues: list[Queue], *, last: bool = False) -> None:
        """Publish `queues`, or drop them if the broker is away."""
        if self._left or self._bus.stats().buffered > MAX_UNSENT:
            return
        self._left = last
        self._reported_waiting, self._reported_ns = any(each.waits for each in queues), self._clock.now_ns()
        self._reported_tokens = _tokens(queues)
        message = GatewayQueues(
            gateway_id=self._gateway_id,
            incarnation=self._began_ns,
            told_unix_ns=self._reported_ns,
            queues=[ModelQueue(**asdict(queue)) for queue in queues[:MAX_MODELS]],
            last=last,
        )
        self._bus.publish(QUEUES, message)


def _tokens(queues: list[Queue]) -> int:
    return sum(each.prefill_tokens + each.decode_prompt_tokens for each in queues)
