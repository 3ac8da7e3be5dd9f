import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.policy.speed import Speed
from libs.policy.worker.credits import GatewayDemand
from libs.worker.gateways.outbox import Outbox
from libs.worker.wire import sequence_id_of

# Prefilled sequences of one gateway whose KV an abort can release early; older ones wait for their lease.
MAX_HELD_HANDLES = 1024


@dataclass(eq=False, slots=True)
class AttachedGateway:
    """A gateway's stream: its sequences, its demand and its pending output."""

    id: int
    """Unique in this worker; a gateway that reconnects gets a new one."""
    demand: GatewayDemand
    outbox: Outbox = field(default_factory=Outbox)
    living: set[int] = field(default_factory=set)
    """Ids of its sequences in the engine."""
    submits: int = 0
    """Number of submits read from its stream."""
    sent_load: Load | None = None
    sent_speed: Speed | None = None
    assignment_news: bool = True
    load_news: bool = True
    sent_s: float = 0.0
    """Loop time at which the last frame was made."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    epoch: int = 0
    """Epoch of the assignment by which the gateway routes, as last reported."""
    leaving: bool = False
    """Whether the worker ends the stream once all pending output is sent."""
    error: FulcrumError | None = None
    """Why the worker closed the stream; None if the gateway left."""
    _handles: "OrderedDict[int, bytes]" = field(default_factory=OrderedDict)

    def sequence_id(self, sequence: int) -> int:
        """Return the worker-wide id of this gateway's sequence number."""
        return sequence_id_of(self.id, sequence)

    def close(self, error: FulcrumError | None = None) -> None:
        """End the stream. Only the first error is kept."""
        if not self.closed.is_set():
            self.error = error
            self.closed.set()

    def hold(self, sequence_id: int, opaque: bytes) -> None:
        """Keep the KV handle of a prefilled sequence, for an early release."""
        self._handles[sequence_id] = opaque
        self._handles.move_to_end(sequence_id)
        if len(self._handles) > MAX_HELD_HANDLES:
            self._handles.popitem(last=False)

    def drop(self, sequence_id: int) -> bytes | None:
        """Remove and return the KV handle of a prefilled sequence."""
        return self._handles.pop(sequence_id, None)

    def drop_all(self) -> list[bytes]:
        handles = list(self._handles.values())
        self._handles.clear()
        return handles
