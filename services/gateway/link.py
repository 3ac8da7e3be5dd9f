"""The gateway's connection to one worker: its stream, credits, load and running sequences."""

import asyncio
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from libs.contracts.errors import VersionMismatch
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS, check_protocol, kv_kind
from libs.contracts.ranges import fault_of
from libs.dispatch.ports import LinkListener, MalformedFrame, Prefilled, QueuedDemand, Work, read_update
from libs.engine.kv_blocks import HANDLE_BYTES, RandomBytes
from libs.perfmodel.profiles import prior_speed
from libs.perfmodel.wire import compute_of, speed_of
from libs.policy.gateway.outlook import CreditBalance, SubmitLoad, WorkerOutlook
from libs.policy.gateway.placement import Attempt, Blocks, Partner
from libs.policy.gateway.view import WorkerView
from libs.policy.roles import Phase, serves
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from libs.runtime.net.access import Metadata
from libs.runtime.tasks import until_first
from libs.runtime.transport import Transport
from services.gateway.metrics import GatewayMetrics

SERVE = f"/{pb.DESCRIPTOR.services_by_name['WorkerService'].full_name}/Serve"


class StreamTraffic:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._sent, self._sent_bytes = (m.labels("sent") for m in (metrics.frames, metrics.frame_bytes))
        self._received, self._received_bytes = (m.labels("received") for m in (metrics.frames, metrics.frame_bytes))

    def open(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        """Open WorkerService.Serve on a channel.

        The (de)serializers count frames and bytes, because gRPC exposes a frame's size nowhere else.
        """
        serve = channel.stream_stream(SERVE, request_serializer=self._pack, response_deserializer=self._unpack)
        return serve(metadata=metadata)

    def _pack(self, frame: pb.GatewayFrame) -> bytes:
        data = frame.SerializeToString()
        self._sent.inc()
        self._sent_bytes.inc(len(data))
        return data

    def _unpack(self, data: bytes) -> pb.WorkerFrame:
        self._received.inc()
        self._received_bytes.inc(len(data))
        return pb.WorkerFrame.FromString(data)


log = structlog.get_logger()

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
# The bound on the submits in one frame, well below gRPC's message limit. The next frame carries the rest.
MAX_SUBMIT_BYTES = 4 * 1024 * 1024


class _End(Enum):
    BROKEN = "broken"
    CLOSED = "closed"
    """The worker closed the stream cleanly."""
    OURS = "ours"
    """The gateway ended the stream."""


class WorkerLink:
    """The stream to one incarnation of one worker.

    `run` is the only coroutine. All other methods are synchronous and add to the next frame.
    """

    def __init__(
        self,
        worker: common.Worker,
        *,
        hello: pb.Hello,
        transport: Transport,
        traffic: StreamTraffic,
        listener: LinkListener,
        clock: Clock,
        random_bytes: RandomBytes,
        tpot_ns: float = 0.0,
        early_decodes: bool = False,
    ) -> None:
        """Create the link. `tpot_ns` is the TPOT target of requests that specify none; 0 means no target.

        `early_decodes` allows named blocks, and `random_bytes` draws their names.
        """
        self.id = worker.id
        self.incarnation = worker.incarnation
        self.key = worker.id, worker.incarnation
        self.address = worker.address
        self.prefill = CreditBalance()
        self.decode = CreditBalance()
        self.running: set[int] = set()
        """The ids of sequences that run on the worker or whose blocks it still stores."""
        self._prompts: dict[int, bool] = {}
        """The running sequences for which the worker computes the prompt, by id.

        The value is true for a line of a batch job.
        """
        self._unanswered: set[int] = set()
        """The ids of sequences sent while the worker was silent. The worker's next frame clears them."""
        self.silent_ms = 0.0
        """The milliseconds since the last frame. Time in which this process was too late to read one is excluded."""
        self.kv_kind = ""
        """A key that is equal for workers that can exchange blocks: those with the same weights and KV layout."""
        self.kv_once = False
        """True if the KV blocks that the worker offers can be read only once."""
        self.left = False
        """True if the stream was ended for silence and no frame has arrived since."""
        self._leaving = asyncio.Event()
        self._hello = hello
        self._transport = transport
        self._traffic = traffic
        self._listener = listener
        self._worker: common.Worker | None = None
        self._clock = clock
        self._registered = worker
        self._tpot_ns = tpot_ns
        self._early_decodes = early_decodes
        self._random_bytes = random_bytes
        self.outlook = outlook_of(worker, tpot_ns)
        self._next = pb.GatewayFrame()
        self._submits: deque[pb.Submit] = deque()
        self._proceeds: list[pb.Proceed] = []
        self._aborts: list[int] = []
        self._hand_overs: list[int] = []
        self._demand = QueuedDemand()
        self._wake = asyncio.Event()

    # ------------------------------------------------------------ state

    @property
    def connected(self) -> bool:
        """Return whether the stream is open and the worker has sent its description."""
        return self._worker is not None

    @property
    def worker(self) -> common.Worker | None:
        """The worker as it last described itself; None while the stream is down."""
        return self._worker

    @property
    def model(self) -> str:
        """The model assigned to the worker; empty while the stream is down."""
        return self._worker.assignment.model if self._worker else ""

    @property
    def serving(self) -> bool:
        return self._worker is not None and self._worker.state == common.WORKER_STATE_READY

    def takes(self, phase: int) -> bool:
        """Return whether the worker accepts work of `phase` now, regardless of credits."""
        return self._worker is not None and self.serving and serves(self._worker.assignment, phase)

    def partner(self) -> Partner | None:
        """Return the worker as the destination of a KV hand-off, or None while the stream is down."""
        if self._worker is None:
            return None
        can = self._worker.capabilities
        return Partner(self.takes(Phase.DECODE), self.kv_kind, can.streams_kv, can.named_kv)

    def named_blocks(self, tokens: int) -> Blocks | None:
        """Return blocks with a new random name for a prompt that the worker would compute in its next step.

        The decode worker can then read the blocks before their prefill has been answered. Return None if that is not
        possible.
        """
        worker = self._worker
        if not self._early_decodes or worker is None:
            return None
        if not worker.capabilities.named_kv or worker.capabilities.kv_once:
            return None
        if not self.outlook.begins_at_once(tokens):
            return None
        source = pb.KvSource(
            worker_id=self.id,
            incarnation=self.incarnation,
            address=worker.address,
            handle=self._random_bytes(HANDLE_BYTES),
            tokens=tokens,
            blocks=-(-tokens // worker.capabilities.block_size_tokens),
            kv_layout=worker.capabilities.kv_layout,
            streamed=True,
            named=True,
        )
        return Blocks(source, self.id, self.kv_kind, once=False, named=True)

    def quiet(self, sequence_id: int) -> bool:
        """Return whether no frame has arrived since the sequence was sent.

        The worker may have died before it read the sequence.
        """
        return sequence_id in self._unanswered

    def view(self) -> WorkerView | None:
        """Return the worker in the form that the binding policy reads, or None while it accepts no work."""
        worker = self._worker
        if worker is None or not self.serving:
            return None
        return self.outlook.view(
            worker,
            self.kv_kind,
            prefill_credits=self.prefill.free,
            decode_credits=self.decode.free,
            prompts=len(self._prompts),
            batch_prompts=sum(self._prompts.values()),
        )

    @property
    def overdue_ms(self) -> float:
        """The milliseconds since the last frame, scaled down for idle workers, which send frames less often."""
        return self.silent_ms * (1.0 if self.running else SIGN_OF_LIFE_MS / RESTING_SIGN_OF_LIFE_MS)

    def leave(self) -> None:
        """End the stream of a silent worker. If the worker is alive, it then aborts the sequences of that stream."""
        self.left = True
        self._leaving.set()

    # ------------------------------------------------------------ content of the next frame

    def submit(self, attempt: Attempt, work: Work, blocks: Blocks | None) -> None:
        """Send work. It uses a free prefill credit, or the decode credit reserved for it."""
        assert self._worker is not None
        sequence_id, phase = attempt.sequence_id, attempt.phase
        if self.overdue_ms > SIGN_OF_LIFE_MS:
            self._unanswered.add(sequence_id)
        if not self.running:
            self.silent_ms = 0.0  # a busy worker has to send frames more often
        self.running.add(sequence_id)
        if phase is Phase.PREFILL:
            self.prefill.use()
            self._prompts[sequence_id] = work.batch
        else:
            self.decode.use_reserved()
            self.outlook.reserved(work.prompt_tokens, -1)
        if self.prefill.spent or self.decode.spent:
            self._return_credits()
        images = 0
        if phase is not Phase.DECODE:
            images = self.outlook.take_images(work.placed_images, work.cached_hints.get(self.id, 0))
        self.outlook.sent(sequence_id, SubmitLoad.of(work.tokens, work.cached_hints, self.id, phase, images))
        self._submits.append(work.message(attempt, blocks, self._worker.assignment.epoch))
        self._wake.set()

    def proceed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Send a streamed sequence the tokens that the prefill worker sampled, once its prompt is computed."""
        self._proceeds.append(pb.Proceed(sequence=sequence_id, token_ids=pack_u32(token_ids)))
        self._wake.set()

    def hand_over(self, sequence_id: int) -> None:
        """Ask the worker to move a running sequence to another worker, which has reserved a place for it."""
        self._hand_overs.append(sequence_id)
        self._wake.set()

    def forget(self, sequence_id: int, *, abort: bool) -> None:
        """Ignore further events of a sequence. With `abort`, the worker also ends it or frees its blocks."""
        self.running.discard(sequence_id)
        self._prompts.pop(sequence_id, None)
        self._unanswered.discard(sequence_id)
        self.outlook.ended(sequence_id)
        if abort and self.connected:
            self._aborts.append(sequence_id)
            self._wake.set()

    def reserve(self, prompt_tokens: int) -> None:
        """Reserve a decode credit for a sequence with this many prompt tokens."""
        self.decode.reserve()
        self.outlook.reserved(prompt_tokens)

    def release(self, prompt_tokens: int) -> None:
        """Return the credit reserved for a sequence with this many prompt tokens."""
        self.outlook.reserved(prompt_tokens, -1)
        self.decode.release()
        self._return_credits()

    def set_demand(self, demand: QueuedDemand) -> None:
        """Put the queue's demand into the next frame.

        The frame is sent at once if the new demand can change how workers divide credits among gateways.
        """
        if demand == self._demand or not self.connected:
            return
        reported, self._demand = self._demand, demand
        waiting, tokens, deadline_ns = demand
        message = pb.Demand(waiting=waiting, waiting_tokens=tokens, head_deadline_unix_ns=deadline_ns)
        self._next.demand.CopyFrom(message)
        grown = demand.waiting >= 2 * reported.waiting or not demand.waiting
        if grown or demand.head_deadline_unix_ns < reported.head_deadline_unix_ns:
            self._wake.set()

    def _return_credits(self) -> None:
        prefill, decode = self.prefill.give_back(), self.decode.give_back()
        spent_prefill, spent_decode = self.prefill.take_spent(), self.decode.take_spent()
        if prefill or decode or spent_prefill or spent_decode:
            self._next.returned_prefill += prefill
            self._next.returned_decode += decode
            self._next.spent_prefill += spent_prefill
            self._next.spent_decode += spent_decode
            self._wake.set()

    # ------------------------------------------------------------ the stream

    async def run(self) -> None:
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            end = _End.BROKEN
            try:
                await self._connect(backoff)
                end = _End.BROKEN if self._leaving.is_set() else _End.CLOSED
                reason = "the worker closed the stream" if end is _End.CLOSED else "the worker was silent"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except asyncio.InvalidStateError:  # a write after the stream's end, before its status was read
                reason = "the stream ended"
            except VersionMismatch as error:
                end = _End.OURS
                reason = error.message
            except (MalformedFrame, DecodeError) as error:
                end = _End.OURS
                reason = f"the worker sent an invalid frame: {error}"
            except asyncio.CancelledError:
                end = _End.OURS
                raise
            finally:
                self._reset(end)
            wait_s = backoff.next_s()
            log.info("worker link is down", worker=self.id, address=self.address, reason=reason, retry_s=wait_s)
            await asyncio.sleep(wait_s)

    async def _connect(self, backoff: Backoff) -> None:
        # Each attempt has its own channel, because gRPC's back-off within a channel is longer than this one.
        async with self._transport.channel(self.address) as channel:
            stream = self._traffic.open(channel, self._transport.metadata(self.address))
            await stream.write(pb.GatewayFrame(hello=self._hello))
            try:
                await until_first(
                    read=self._read(stream, backoff), write=self._write(stream), leaving=self._leaving.wait()
                )
            finally:
                stream.cancel()

    async def _read(self, stream: Any, backoff: Backoff) -> None:
        while (frame := await stream.read()) is not grpc.aio.EOF:
            if frame is None:  # gRPC returns None for bytes that do not parse
                raise MalformedFrame("its bytes do not parse")
            if fault := _fault_of(frame):
                raise MalformedFrame(f"{fault} is out of its range")
            self.silent_ms = 0.0
            self._unanswered.clear()
            if frame.HasField("worker") and not self._take_worker(frame.worker):
                return
            self._take(frame)
            backoff.reset()

    async def _write(self, stream: Any) -> None:
        """Send one frame for all content queued since the previous frame."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await stream.write(self._take_frame())

    def _take_frame(self) -> pb.GatewayFrame:
        frame, self._next = self._next, pb.GatewayFrame()
        size_bytes = 0
        while self._submits and size_bytes < MAX_SUBMIT_BYTES:
            submit = self._submits.popleft()
            size_bytes += submit.ByteSize()
            frame.submits.append(submit)
        if self._submits:
            self._wake.set()
        else:  # always after the submits that they concern
            frame.proceeds.extend(self._proceeds)
            frame.hand_overs = pack_u32(self._hand_overs)
            frame.aborts = pack_u32(self._aborts)
            self._proceeds.clear()
            self._hand_overs.clear()
            self._aborts.clear()
        return frame

    def _take_worker(self, worker: common.Worker) -> bool:
        """Apply the worker's new description. Return False if another worker answers at this address."""
        if (worker.id, worker.incarnation) != (self.id, self.incarnation):
            return False
        if self._worker is None:
            check_protocol(f"worker {self.id}", worker.protocol, worker.oldest_protocol)
            log.info("worker link is up", worker=self.id, address=self.address)
            self.left = False
        self._worker = worker
        self.kv_kind = kv_kind(worker)
        self.kv_once = worker.capabilities.kv_once
        self._next.epoch = worker.assignment.epoch  # work is bound with this epoch from now on
        self._wake.set()
        return True

    def _take(self, frame: pb.WorkerFrame) -> None:
        if frame.HasField("credit"):
            credit = frame.credit
            self.prefill.recall(credit.prefill_recall)
            self.decode.recall(credit.decode_recall)
            self._return_credits()  # before the grant of the same frame, which is not recalled
            self.prefill.grant(credit.prefill_grant)
            self.decode.grant(credit.decode_grant)
        if self._worker is not None:
            read_report(self.outlook, frame, self._worker, self._clock.now_ns())
        update = read_update(frame, self.kv_kind, kv_once=self.kv_once)
        for each in update.events:
            if isinstance(each, Prefilled):
                self._prompts.pop(each.sequence_id, None)
        self._listener.received(self, update)

    def _reset(self, end: _End) -> None:
        """Clear the stream's state and report the sequences lost with it.

        A worker that closes the stream itself, such as a draining one, is not reported as dead.
        """
        if end is not _End.OURS and not self.connected and not self.left:  # a silent worker may only be frozen
            self._listener.unreachable(self)
        died = end is _End.BROKEN and self.serving
        self._worker = None
        self.prefill, self.decode = CreditBalance(), CreditBalance()
        self.running.clear()
        self._prompts.clear()
        self._submits.clear()
        self._proceeds.clear()
        self._hand_overs.clear()
        self._aborts.clear()
        self._next = pb.GatewayFrame()
        self._demand = QueuedDemand()
        self.outlook = outlook_of(self._registered, self._tpot_ns)
        self._leaving.clear()
        self._listener.lost(self, silent=self.left, died=died)
        self._unanswered.clear()


def _fault_of(frame: pb.WorkerFrame) -> str:
    """Return the name of the first field that is out of range, or an empty string.

    Tokens are checked where they are read.
    """
    fault = fault_of(frame.worker, frame.worker.ByteSize()) if frame.HasField("worker") else ""
    return fault or (fault_of(frame.load, 0) if frame.HasField("load") else "")


def outlook_of(worker: common.Worker, tpot_ns: float = 0.0) -> WorkerOutlook:
    """Return the initial outlook of a worker that has not reported load or speed.

    `tpot_ns` is the TPOT target of requests that specify none; 0 means no target.
    """
    can = worker.capabilities
    compute = compute_of(can.compute) if can.HasField("compute") else None
    speed = prior_speed(worker.engine, worker.device, can.chunk_tokens, compute, max(worker.gpus, 1))
    return WorkerOutlook(worker.device, speed, can.kv_blocks, tpot_ns)


def read_report(outlook: WorkerOutlook, frame: pb.WorkerFrame, worker: common.Worker, now_ns: int) -> None:
    """Update an outlook with the load and the speed that a frame reports."""
    if frame.HasField("speed"):
        outlook.speed = speed_of(frame.speed, worker.capabilities.chunk_tokens) or outlook.speed
    if frame.HasField("load"):
        outlook.on_load_report(frame.load, frame.submits_taken, now_ns)
