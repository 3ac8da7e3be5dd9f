"""The gateways attached to a worker: their streams, their credits and their pending output.

Synchronous; the gRPC servicer drives it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest, QueueFull
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS, check_protocol
from libs.engine.port import Engine
from libs.policy.speed import Speed
from libs.policy.worker.credits import CreditPool, Credits, GatewayDemand
from libs.worker.gateways.outbox import Outbox
from libs.worker.speed import WorkerSpeed
from libs.worker.wire import load_message, sequence_id_of

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


log = structlog.get_logger()

MAX_GATEWAYS = 64
BEAT_S = SIGN_OF_LIFE_MS / 1000
RESTING_BEAT_S = RESTING_SIGN_OF_LIFE_MS / 1000
# The precision of event-loop timers: work due within it is done now instead of in another wake-up.
TIMER_S = 0.002


class AttachedGateways:
    """All attached gateways. Pending output of a gateway leaves as one frame whenever its stream can be written."""

    def __init__(self, engine: Engine, speed: WorkerSpeed, cluster: str, describe: Callable[[], common.Worker]) -> None:
        """`describe` returns the worker's present description."""
        self._engine = engine
        self._speed = speed
        self._cluster = cluster
        self._describe = describe
        self._links: dict[int, AttachedGateway] = {}
        self._link_ids = count(1)
        self.credits = Credits()
        self._epoch_reported = asyncio.Event()
        # Set when a gateway without work here submits some: its heartbeats now have to come sooner.
        self.stirred = asyncio.Event()

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[AttachedGateway]:
        return iter(self._links.values())

    def attach(self, hello: pb.Hello) -> AttachedGateway:
        """Attach a gateway. Raise InvalidRequest if it belongs to another cluster, VersionMismatch, or QueueFull at
        the bound.
        """
        if hello.cluster != self._cluster:
            raise InvalidRequest(f"this worker serves cluster {self._cluster!r}, not {hello.cluster!r}")
        check_protocol(f"gateway {hello.gateway_id}", hello.protocol, hello.oldest_protocol)
        if len(self._links) >= MAX_GATEWAYS:
            raise QueueFull(f"{MAX_GATEWAYS} gateways are attached already")
        gateway = AttachedGateway(next(self._link_ids), GatewayDemand(hello.gateway_id))
        self._links[gateway.id] = gateway
        self.credits.attach(gateway.id)
        self.settle()
        return gateway

    def detach(self, gateway: AttachedGateway) -> None:
        """Detach a gateway that has left and free its credits."""
        gateway.close()
        del self._links[gateway.id]
        self.credits.detach(gateway.id)
        self._epoch_reported.set()

    # ------------------------------------------------------------ epochs

    def report_epoch(self, gateway: AttachedGateway, epoch: int) -> None:
        """Record that the gateway routes by the assignment of `epoch`."""
        gateway.epoch = epoch
        self._epoch_reported.set()

    def behind(self, epoch: int) -> int:
        """Count the gateways that have not yet reported `epoch` or a later one."""
        return sum(gateway.epoch < epoch for gateway in self)

    async def wait_for_epoch(self, epoch: int) -> None:
        """Wait until every gateway has reported `epoch` or a later one."""
        while self.behind(epoch):
            self._epoch_reported.clear()
            await self._epoch_reported.wait()

    # ------------------------------------------------------------ credits

    def pool(self, phase: pb.Phase) -> CreditPool:
        return self.credits.prefill if phase == pb.PHASE_PREFILL else self.credits.decode

    def returned(self, gateway: AttachedGateway, frame: pb.GatewayFrame) -> None:
        """Record the gateway's demand and the credits that it returns."""
        if frame.HasField("demand"):
            demand = frame.demand
            gateway.demand = GatewayDemand(gateway.demand.gateway_id, demand.waiting, demand.head_deadline_unix_ns)
        self.credits.prefill.returned(gateway.id, frame.returned_prefill)
        self.credits.decode.returned(gateway.id, frame.returned_decode)
        self.credits.prefill.spent(gateway.id, frame.spent_prefill)
        self.credits.decode.spent(gateway.id, frame.spent_decode)

    def resize(self, prefill: int, decode: int) -> None:
        self.credits.resize(prefill, decode)

    def settle(self) -> None:
        """Grant free credits and wake the gateways that get some."""
        for link_id in self.credits.settle({gateway.id: gateway.demand for gateway in self}):
            self._links[link_id].wake.set()

    # ------------------------------------------------------------ frames to gateways

    def has_news(self, gateway: AttachedGateway) -> bool:
        """Return whether a frame would carry more than the load."""
        return self.credits.has_news(gateway.id) or gateway.assignment_news or gateway.load_news or bool(gateway.outbox)

    def take_frame(self, gateway: AttachedGateway) -> pb.WorkerFrame:
        """Return the next frame for `gateway` with as much pending output as fits."""
        frame = pb.WorkerFrame(load=load_message(self._engine.load()), submits_taken=gateway.submits)
        if gateway.assignment_news:
            frame.worker.CopyFrom(self._describe())
        if self.credits.has_news(gateway.id):
            prefill_grant, prefill_recall, decode_grant, decode_recall = self.credits.take(gateway.id)
            frame.credit.CopyFrom(
                pb.Credit(
                    prefill_grant=prefill_grant,
                    prefill_recall=prefill_recall,
                    decode_grant=decode_grant,
                    decode_recall=decode_recall,
                )
            )
        gateway.sent_speed = self._speed.report(frame, gateway.sent_speed)
        gateway.outbox.take(frame)
        gateway.assignment_news = gateway.load_news = False
        gateway.sent_s = asyncio.get_running_loop().time()
        gateway.sent_load = frame.load
        return frame

    def tell_assignment(self) -> None:
        """Send the worker's changed description to every gateway."""
        for gateway in self:
            gateway.assignment_news = True
            gateway.wake.set()

    def tell_load(self) -> None:
        """Send the load to gateways whose last frame carried another one."""
        load = load_message(self._engine.load())
        for gateway in self:
            if gateway.sent_load != load:
                gateway.load_news = True
                gateway.wake.set()

    def beat(self, now_s: float) -> float:
        """Send the load to gateways whose last frame is too old, since a silent worker counts as dead.

        Return when the next heartbeat is due by the loop's clock if nothing else is sent until then. Blocks that
        wait to be pulled count as work: otherwise their gateway would have them computed again elsewhere.
        """
        due_s = now_s + RESTING_BEAT_S
        holds_blocks = self._engine.integrity().leased_handles > 0
        for gateway in self:
            beat_s = BEAT_S if gateway.living or holds_blocks else RESTING_BEAT_S
            if gateway.sent_s + beat_s - now_s < TIMER_S:
                gateway.load_news = True
                gateway.wake.set()
                due_s = min(due_s, now_s + beat_s)
            else:
                due_s = min(due_s, gateway.sent_s + beat_s)
        return due_s

    def close_if_unread(self, gateway: AttachedGateway) -> None:
        """End the stream of a gateway that has stopped reading."""
        if gateway.outbox.overflowed and not gateway.closed.is_set():
            log.warning("gateway does not read its stream", gateway=gateway.demand.gateway_id)
            gateway.close(QueueFull("the stream is not read fast enough"))

    def hang_up(self) -> None:
        """End every gateway's stream once all pending output is sent."""
        for gateway in self:
            gateway.leaving = True
            gateway.wake.set()
