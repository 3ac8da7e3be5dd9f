"""The gateways attached to a worker: their streams, their credits, and the frames with their pending output."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest, QueueFull
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SequenceEvent, WorkerFrame
from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS, check_protocol
from libs.engine.port import Engine
from libs.engine.reports import EngineEvent, Logprob, SequenceOutput
from libs.perfmodel.profiles import prior_speed
from libs.perfmodel.wire import speed_message
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.credits import CreditPool, Credits, GatewayDemand
from libs.policy.worker.handing_over import TransferSpeed
from libs.runtime.net.rpc import abort_with, read_message
from libs.runtime.tasks import until_first
from libs.worker.wire import load_message, logprobs_message, sequence_id_of, sequence_of

log = structlog.get_logger()

# With 20 top logprobs for each token, this keeps a frame below half of gRPC's message bound.
MAX_FRAME_TOKENS = 8192
# The upper bound of prompt logprobs in a frame, top tokens included. Each takes 8 bytes, and one prompt has fewer.
MAX_FRAME_SCORES = 262_144
# The upper bound of vectors in a frame. A single vector is far smaller.
MAX_FRAME_POOLED_BYTES = 4 * 1024 * 1024
# With more pending tokens and events than this, a gateway counts as no longer reading.
MAX_PENDING = 262_144


class Outbox:
    """The pending tokens and events of one gateway, in order."""

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[int, Logprob] = {}
        self._events: list[SequenceEvent] = []

    def __bool__(self) -> bool:
        return bool(self._token_ids or self._events)

    @property
    def overflowed(self) -> bool:
        """True if more is pending than `MAX_PENDING`, so that the gateway must be dropped."""
        return len(self._token_ids) + len(self._events) > MAX_PENDING

    def add_tokens(self, output: SequenceOutput) -> None:
        sequence = sequence_of(output.sequence_id)
        if output.logprobs:
            self._logprobs.update(enumerate(output.logprobs, len(self._token_ids)))
        for token_id in output.token_ids:
            self._sequences.append(sequence)
            self._token_ids.append(token_id)

    def add_event(self, event: SequenceEvent) -> None:
        """Append an event. It is sent after all pending tokens."""
        self._events.append(event)

    def take(self, frame: WorkerFrame) -> None:
        """Move as much into `frame` as fits. Events follow once no token is pending."""
        count = self._tokens_that_fit()
        frame.token_sequences = pack_u32(self._sequences[:count])
        frame.token_ids = pack_u32(self._token_ids[:count])
        del self._sequences[:count], self._token_ids[:count]
        if self._logprobs:
            sent = {index: logprob for index, logprob in self._logprobs.items() if index < count}
            self._logprobs = {i - count: logprob for i, logprob in self._logprobs.items() if i >= count}
            frame.logprobs.extend(logprobs_message(index, logprob) for index, logprob in sent.items())
        if not self._token_ids:
            events = self._events_that_fit()
            frame.events.extend(self._events[:events])
            del self._events[:events]

    def _events_that_fit(self) -> int:
        pooled_bytes = 0
        for index, event in enumerate(self._events):
            pooled_bytes += len(event.finished.pooled)
            if pooled_bytes > MAX_FRAME_POOLED_BYTES and index:
                return index
        return len(self._events)

    def _tokens_that_fit(self) -> int:
        count, scores = min(len(self._token_ids), MAX_FRAME_TOKENS), 0
        for index in sorted(self._logprobs):
            prompt = self._logprobs[index].prompt
            if not prompt:
                continue
            scores += len(prompt) * (1 + len(prompt[0].top))
            if scores > MAX_FRAME_SCORES and 0 < index < count:
                return index
        return count


class WorkerSpeed:
    """The speed that gateways get, learned from steps and KV transfers. Small changes are not reported."""

    def __init__(self, engine: Engine, gpus: int) -> None:
        can = engine.capabilities
        self._prior = prior_speed(engine.name, engine.device, can.chunk_tokens, can.compute, gpus, variant=can.variant)
        self._speed = self._prior
        self._transfers = TransferSpeed(can.block_size_tokens)
        self._link = TransferSpeed(can.block_size_tokens)
        """The speed of the link alone, without the time in which prompts were computed."""

    @property
    def speed(self) -> Speed:
        return self._speed

    @property
    def settled_kv_token_ns(self) -> float:
        """The time to receive the KV of one token, for judging the link; 0 before enough transfers."""
        return self._link.settled_token_ns

    def learned(self, model: StepTimeModel) -> None:
        self._speed = replace(self._speed, step_time=model, measured=model != self._prior.step_time)

    def chunked(self, tokens: int) -> None:
        """Set the maximum number of prompt tokens per step."""
        self._speed = replace(self._speed, chunk_tokens=max(tokens, 1))

    def on_event(self, event: EngineEvent) -> None:
        """Learn the time to transfer a token's KV from the event's transfers."""
        for transfer in event.kv_transfers:
            if transfer.wait_unknown:
                continue
            self._transfers.arrived(transfer.blocks, transfer.end_unix_ns - transfer.start_unix_ns)
            self._link.arrived(transfer.blocks, transfer.link_ns(self._speed.chunk_tokens))
        if self._transfers.differs(self._speed.kv_token_ns):
            self._speed = replace(self._speed, kv_token_ns=self._transfers.token_ns)

    def report(self, frame: WorkerFrame, reported: Speed | None) -> Speed:
        """Write the speed into `frame` unless it is `reported`, which the gateway has. Return the speed."""
        if self._speed is not reported:
            frame.speed.CopyFrom(speed_message(self._speed))
        return self._speed


# The upper bound of a gateway's handles whose KV an abort can release early. Older ones end with their lease.
MAX_HELD_HANDLES = 1024


@dataclass(eq=False, slots=True)
class AttachedGateway:
    """The stream of a gateway, with its sequences, its demand and its pending output."""

    id: int
    """An id unique in this worker. A gateway that reconnects gets a new one."""
    demand: GatewayDemand
    outbox: Outbox = field(default_factory=Outbox)
    living: set[int] = field(default_factory=set)
    """The ids of the gateway's sequences in the engine."""
    submits: int = 0
    """The number of submits read from the gateway's stream."""
    sent_load: Load | None = None
    sent_speed: Speed | None = None
    assignment_news: bool = True
    load_news: bool = True
    sent_s: float = 0.0
    """The loop time at which the last frame was made."""
    output_s: float = -math.inf
    """The loop time at which the last frame with output was made."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    epoch: int = 0
    """The epoch of the assignment by which the gateway routes, as it last reported."""
    leaving: bool = False
    """True if the worker ends the stream once all pending output has been sent."""
    error: FulcrumError | None = None
    """The reason why the worker closed the stream; None if the gateway left."""
    _handles: "OrderedDict[int, bytes]" = field(default_factory=OrderedDict)

    def sequence_id(self, sequence: int) -> int:
        """Return the worker-wide id of a sequence that the gateway numbers `sequence`."""
        return sequence_id_of(self.id, sequence)

    def close(self, error: FulcrumError | None = None) -> None:
        """End the stream. Only the first error is stored."""
        if not self.closed.is_set():
            self.error = error
            self.closed.set()

    def hold(self, sequence_id: int, opaque: bytes) -> None:
        """Store the KV handle of a prefilled sequence, so that an abort can release its blocks."""
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


MAX_GATEWAYS = 64
BEAT_S = SIGN_OF_LIFE_MS / 1000
RESTING_BEAT_S = RESTING_SIGN_OF_LIFE_MS / 1000
# The precision of event-loop timers. Work due within it is done now, which saves a wake-up.
TIMER_S = 0.002


class AttachedGateways:
    """All attached gateways. A gateway's pending output is sent in one frame whenever its stream can be written."""

    def __init__(self, engine: Engine, speed: WorkerSpeed, cluster: str, describe: Callable[[], common.Worker]) -> None:
        """Create the set. `describe` returns the worker's current description."""
        self._engine = engine
        self._speed = speed
        self._cluster = cluster
        self._describe = describe
        self._links: dict[int, AttachedGateway] = {}
        self._link_ids = count(1)
        self.credits = Credits()
        self._epoch_reported = asyncio.Event()
        # Set when a gateway without sequences here submits some, because its next heartbeat is then due sooner.
        self.became_busy = asyncio.Event()

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[AttachedGateway]:
        return iter(self._links.values())

    def attach(self, hello: pb.Hello) -> AttachedGateway:
        """Attach a gateway. Raise InvalidRequest for another cluster's, VersionMismatch, or QueueFull at the bound."""
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
        gateway.close()
        del self._links[gateway.id]
        self.credits.detach(gateway.id)
        # `wait_for_epoch` must not wait for a gateway that has left.
        self._epoch_reported.set()

    def begin_work(self, gateway: AttachedGateway) -> None:
        """Prepare for the first submits of a gateway without sequences here.

        Its output is not delayed by earlier output.
        """
        gateway.output_s = -math.inf
        self.became_busy.set()

    # ------------------------------------------------------------ epochs

    def report_epoch(self, gateway: AttachedGateway, epoch: int) -> None:
        """Record that the gateway routes by the assignment of `epoch`."""
        gateway.epoch = epoch
        self._epoch_reported.set()

    def behind(self, epoch: int) -> int:
        """Return the number of gateways that have not reported `epoch` or a later one."""
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
        """Record the gateway's demand, and the credits that it returns or has spent."""
        if frame.HasField("demand"):
            demand = frame.demand
            gateway.demand = GatewayDemand(gateway.demand.gateway_id, demand.waiting, demand.head_deadline_unix_ns)
        self.credits.prefill.returned(gateway.id, frame.returned_prefill)
        self.credits.decode.returned(gateway.id, frame.returned_decode)
        self.credits.prefill.spent(gateway.id, frame.spent_prefill)
        self.credits.decode.spent(gateway.id, frame.spent_decode)

    def settle(self) -> None:
        """Grant free credits, and wake the gateways that get some."""
        for link_id in self.credits.settle({gateway.id: gateway.demand for gateway in self}):
            self._links[link_id].wake.set()

    # ------------------------------------------------------------ frames to gateways

    def has_news(self, gateway: AttachedGateway) -> bool:
        """Return whether the next frame would contain more than the load."""
        return self.credits.has_news(gateway.id) or gateway.assignment_news or gateway.load_news or bool(gateway.outbox)

    def take_frame(self, gateway: AttachedGateway) -> pb.WorkerFrame:
        """Return the next frame for `gateway`, with as much pending output as fits."""
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
        gateway.sent_s = asyncio.get_running_loop().time()
        if gateway.outbox:
            gateway.output_s = gateway.sent_s
        gateway.outbox.take(frame)
        gateway.assignment_news = gateway.load_news = False
        gateway.sent_load = frame.load
        return frame

    def send_assignment(self) -> None:
        """Send the worker's changed description to every gateway."""
        for gateway in self:
            gateway.assignment_news = True
            gateway.wake.set()

    def send_load(self) -> None:
        """Send the load to each gateway whose last frame had another one."""
        load = load_message(self._engine.load())
        for gateway in self:
            if gateway.sent_load != load:
                gateway.load_news = True
                gateway.wake.set()

    def beat(self, now_s: float) -> float:
        """Send the load to gateways whose last frame is too old, since gateways take a silent worker for dead.

        Return the loop time at which the next heartbeat is due if no other frame is sent. A gateway gets heartbeats
        sooner if it has sequences here, or if blocks wait for a receiver, which it would otherwise have recomputed
        elsewhere.
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
        if gateway.outbox.overflowed and not gateway.closed.is_set():
            log.warning("gateway does not read its stream", gateway=gateway.demand.gateway_id)
            gateway.close(QueueFull("the stream is not read fast enough"))

    def hang_up(self) -> None:
        """End every gateway's stream once all pending output has been sent."""
        for gateway in self:
            gateway.leaving = True
            gateway.wake.set()


HELLO_TIMEOUT_S = 5.0
# The minimum interval between frames with output for one gateway, so that an engine with shorter steps does not wake
# gateway and client for each token. A model's steps on a GPU are longer, so their output is never delayed.
OUTPUT_PAUSE_S = 0.004

Context = grpc.aio.ServicerContext[Any, Any]


class FrameReceiver(Protocol):
    """The part of the worker host that gateways' streams use."""

    gateways: AttachedGateways

    def receive(self, gateway: AttachedGateway, frame: pb.GatewayFrame) -> None:
        """Process a frame. Raise InvalidRequest if it breaks the protocol."""

    def detach(self, gateway: AttachedGateway) -> None:
        """Abort the sequences of a gateway that has left."""


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """The gRPC service that carries frames between gateways and the host. The end of a stream aborts its sequences."""

    def __init__(self, host: FrameReceiver) -> None:
        self._host = host

    async def Serve(self, _frames: Any, context: Context) -> None:  # noqa: N802 - the service's name in proto
        """Serve one gateway until it leaves or the worker closes the stream."""
        try:
            first = await _hello(context)
            gateway = self._host.gateways.attach(first.hello)
        except FulcrumError as error:
            await abort_with(context, error)
            return
        log.info("gateway attached", gateway=gateway.demand.gateway_id)
        try:
            # The metadata is sent separately. If the client cut off a first frame, gRPC could not send the final
            # status.
            await context.send_initial_metadata(())
            await self._carry(gateway, first, context)
        finally:
            self._host.detach(gateway)
            log.info("gateway detached", gateway=gateway.demand.gateway_id, reason=str(gateway.error or "left"))
        if gateway.error is not None:
            await abort_with(context, gateway.error)

    async def _carry(self, gateway: AttachedGateway, first: pb.GatewayFrame, context: Context) -> None:
        await until_first(
            read=self._read(gateway, first, context), write=self._write(gateway, context), closed=gateway.closed.wait()
        )

    async def _read(self, gateway: AttachedGateway, first: pb.GatewayFrame, context: Context) -> None:
        frame: Any = first
        while frame is not grpc.aio.EOF:
            try:
                self._host.receive(gateway, frame)
                frame = await read_message(context)
            except InvalidRequest as error:
                gateway.close(error)
                return

    async def _write(self, gateway: AttachedGateway, context: Context) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await gateway.wake.wait()
            gateway.wake.clear()
            while self._host.gateways.has_news(gateway):
                if (early_s := gateway.output_s + OUTPUT_PAUSE_S - clock()) > 0:
                    await asyncio.sleep(early_s)
                # The frame is taken after the last write has ended, so that it contains all output since then.
                await context.write(self._host.gateways.take_frame(gateway))
            if gateway.leaving:
                return


async def _hello(context: Context) -> pb.GatewayFrame:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame: Any = await read_message(context)
    except TimeoutError:
        raise InvalidRequest(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    if frame is grpc.aio.EOF or not frame.HasField("hello"):
        raise InvalidRequest("the first frame must carry hello")
    assert isinstance(frame, pb.GatewayFrame)
    return frame
