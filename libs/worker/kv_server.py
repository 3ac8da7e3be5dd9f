"""The KV blocks that a worker offers: KvService over gRPC, and the publication of their hashes in the index.

Each receiver has one stream. A frame takes all pending output whenever the stream can be written.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest, KvLost, KvMismatch, QueueFull
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvChunk, KvExport
from libs.engine.reports import EngineEvent
from libs.runtime.net.rpc import abort_with, read_message
from libs.runtime.tasks import until_first
from libs.stores.kvindex import KvIndex
from libs.worker import kv_wire
from libs.worker.host import WorkerHost
from libs.worker.settings import RENEWALS_PER_LEASE
from libs.worker.wire import numbers

log = structlog.get_logger()

# The interval of keep-alives for a pull without ready blocks, so that its receiver does not take the sender for dead.
TICK_S = 1.0
# The number of ticks for which a receiver may leave sent blocks unconfirmed before the pull fails.
MAX_SILENT_TICKS = 30
_NOTHING = KvChunk(first_block=0, blocks=0)


@dataclass(eq=False, slots=True)
class _Pull:
    number: int
    handle: bytes
    export: KvExport
    in_place: bool
    ahead_bytes: int = 0
    """The number of sent bytes that the receiver has not reported as read."""
    sent_lately: bool = True
    """True if a chunk was sent since the last tick."""
    drained: bool = True
    """True if all blocks that the receiver knows to be ready have been sent."""
    silent_ticks: int = 0
    """The number of ticks since the receiver last confirmed sent blocks."""

    @property
    def may_send(self) -> bool:
        return self.ahead_bytes < kv_wire.WINDOW_BYTES


class KvOutbox:
    """The pulls of one receiver. Pulls with blocks to send take turns of one chunk each."""

    def __init__(self, host: WorkerHost, incarnation: int, *, has_room: Callable[[], bool], wake: Callable[[], None]):
        """Create the outbox.

        `has_room` returns whether this worker accepts another pull. `wake` is called when a frame may be ready.
        """
        self._host = host
        self._incarnation = incarnation
        self._has_room = has_room
        self._wake = wake
        self._pulls: dict[int, _Pull] = {}
        self._turns: deque[_Pull] = deque()
        self._failed: list[pb.PullFailed] = []
        self._alive: list[int] = []
        self._carries_data: bool | None = None
        """True if chunks that are not read in place contain bytes; None before the first such chunk."""

    def __len__(self) -> int:
        return len(self._pulls)

    def receive(self, frame: pb.PullFrame) -> None:
        """Process a frame.

        Raise InvalidRequest if it breaks the protocol; an error of one pull fails only that pull.
        """
        for number in numbers(frame.acks, "acks"):
            if pull := self._end(number):
                self._host.acknowledged(pull.handle)
        for number in numbers(frame.cancels, "cancels"):
            self._end(number)
        for taken in frame.taken:
            if (pull := self._pulls.get(taken.pull)) is not None:
                pull.ahead_bytes = max(pull.ahead_bytes - taken.sent_bytes, 0)
                pull.silent_ticks = 0
        for requested in frame.opens:
            if requested.pull in self._pulls:
                raise InvalidRequest(f"pull {requested.pull} already runs")
            try:
                self._open(requested)
            except FulcrumError as error:
                self._fail(requested.pull, error)
        self._wake()

    def take_frame(self) -> bytes | None:
        """Return everything that can be sent now and fits one frame; None if there is nothing."""
        frame = pb.KvFrame(alive=pack_u32(self._alive) if self._alive else b"")
        self._alive.clear()
        data: list[memoryview] = []
        size_bytes = idle = 0
        while idle < len(self._turns) and size_bytes < kv_wire.MAX_FRAME_BYTES:
            pull = self._turns.popleft()
            chunk = self._next(pull)
            if not pull.export.done and pull.number in self._pulls:
                self._turns.append(pull)
            if chunk is None:
                idle += 1
                continue
            idle = 0
            size_bytes += chunk.data_bytes
            message = kv_wire.chunk_message(pull.number, chunk, last=pull.export.done, in_place=pull.in_place)
            frame.chunks.append(message)
            if not pull.in_place:
                self._carries_data = bool(message.sent_bytes)
            pull.drained = chunk.first_block + chunk.blocks >= chunk.ready_blocks
            if message.sent_bytes:
                pull.ahead_bytes += message.sent_bytes
                data.extend(chunk.data)
        frame.ready.extend(self._newly_ready())  # ready blocks beyond this frame or the pull's window
        frame.failed.extend(self._failed)
        self._failed.clear()
        return kv_wire.encode(frame, data) if frame.ByteSize() else None

    def _newly_ready(self) -> list[pb.PullReady]:
        """Return the ready blocks of pulls whose receiver knows of no unsent block.

        Blocks that are read in place are not reported, since their chunk arrives at once.
        """
        found: list[pb.PullReady] = []
        if self._carries_data is False:
            return found
        for pull in list(self._turns):
            if not (pull.drained and not pull.in_place):
                continue
            try:
                ready = pull.export.ready_blocks
            except FulcrumError:
                continue  # `_next` fails such a pull
            if ready:
                pull.drained = False
                found.append(pb.PullReady(pull=pull.number, blocks=ready))
        return found

    def tick(self) -> None:
        """Advance time by `TICK_S`: send keep-alives, and fail pulls whose receiver is silent."""
        for pull in list(self._pulls.values()):
            # Only in these cases does the receiver owe an acknowledgement or a report.
            if pull.export.done or not pull.may_send:
                pull.silent_ticks += 1
            if pull.silent_ticks > MAX_SILENT_TICKS:
                self._fail(pull.number, KvLost(f"nothing from the receiver within {MAX_SILENT_TICKS * TICK_S:g} s"))
            elif not pull.sent_lately and not pull.export.done:
                self._alive.append(pull.number)
            pull.sent_lately = False
        self._wake()

    def close(self) -> None:
        """End every pull of a receiver that has left. Another receiver can still pull its blocks for a short time."""
        for number in list(self._pulls):
            self._end(number)

    def _open(self, requested: pb.PullOpen) -> None:
        if not self._has_room():
            raise QueueFull("this worker has its maximum number of transfers under way")
        if requested.incarnation != self._incarnation:
            raise KvLost("the worker that held the blocks has restarted")
        engine = self._host.engine
        in_place = bool(requested.shared_nonce) and requested.shared_nonce == engine.capabilities.kv_nonce
        export = engine.export(
            requested.handle,
            requested.kv_layout,
            requested.from_block,
            news=self._wake,
            in_place=in_place,
            named=requested.named,
        )
        pull = self._pulls[requested.pull] = _Pull(requested.pull, requested.handle, export, in_place)
        self._turns.append(pull)

    def _next(self, pull: _Pull) -> KvChunk | None:
        """Return a pull's next chunk; None if no block is ready, its window is full, or it has failed."""
        if not pull.may_send:
            return None
        try:
            chunk = pull.export.take()
        except FulcrumError as error:
            self._fail(pull.number, error)
            return None
        if chunk is None:
            return _NOTHING if pull.export.done else None
        pull.sent_lately = True
        pull.silent_ticks = 0
        return chunk

    def _fail(self, number: int, error: FulcrumError) -> None:
        mismatch = isinstance(error, KvMismatch)
        failure = pb.PULL_FAILURE_KV_MISMATCH if mismatch else pb.PULL_FAILURE_KV_LOST
        self._failed.append(pb.PullFailed(pull=number, failure=failure, detail=error.message))
        self._end(number)

    def _end(self, number: int) -> _Pull | None:
        pull = self._pulls.pop(number, None)
        if pull is None:
            return None
        pull.export.close()
        if not pull.export.done:
            self._turns = deque(other for other in self._turns if other is not pull)
        return pull


# The upper bound of concurrent transfers out of this worker; more are refused. Credits limit them to far fewer.
MAX_PULLS = 512
# The upper bound of concurrent streams; more are refused.
MAX_RECEIVERS = 256

Context = grpc.aio.ServicerContext[Any, Any]


class KvServicer:
    """The gRPC service that sends the blocks of prefilled sequences to other workers."""

    def __init__(self, host: WorkerHost, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation
        self._outboxes: set[KvOutbox] = set()
        self._leaving = asyncio.Event()
        self.refused_pulls = 0
        """The number of transfers refused because `MAX_PULLS` were running."""

    @property
    def pulls(self) -> int:
        return sum(map(len, self._outboxes))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server. It sends the bytes that `kv_wire` encodes."""
        service = pb.DESCRIPTOR.services_by_name["KvService"].full_name
        handler: grpc.RpcMethodHandler[pb.PullFrame, bytes] = grpc.stream_stream_rpc_method_handler(
            self.pull, request_deserializer=pb.PullFrame.FromString, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Pull": handler}),))

    def hang_up(self) -> None:
        self._leaving.set()

    async def pull(self, _frames: Any, context: Context) -> None:
        """Serve one receiver's pulls until it leaves."""
        try:
            # The metadata is sent separately. If the client cut off a first frame, gRPC could not send the final
            # status.
            await context.send_initial_metadata(())
            await self._carry(context)
        except FulcrumError as error:
            await abort_with(context, error)

    async def _carry(self, context: Context) -> None:
        if len(self._outboxes) >= MAX_RECEIVERS:
            log.warning("KV receiver refused", receivers=MAX_RECEIVERS)
            raise QueueFull(f"{MAX_RECEIVERS} receivers are attached already")
        wake = asyncio.Event()
        outbox = KvOutbox(self._host, self._incarnation, has_room=self._has_room, wake=wake.set)
        self._outboxes.add(outbox)
        try:
            await until_first(
                read=_read(outbox, context),
                write=_write(outbox, wake, context),
                tick=_tick(outbox),
                leaving=self._leaving.wait(),
            )
        finally:
            self._outboxes.discard(outbox)
            outbox.close()

    def _has_room(self) -> bool:
        if self.pulls < MAX_PULLS:
            return True
        self.refused_pulls += 1
        log.warning("KV transfer refused", under_way=MAX_PULLS)
        return False


async def _read(outbox: KvOutbox, context: Context) -> None:
    while (frame := await read_message(context)) is not grpc.aio.EOF:
        outbox.receive(frame)


async def _write(outbox: KvOutbox, wake: asyncio.Event, context: Context) -> None:
    while True:
        await wake.wait()
        wake.clear()
        # The frame is taken after the last write has ended, so that it contains all output since then.
        while (frame := outbox.take_frame()) is not None:
            await context.write(frame)


async def _tick(outbox: KvOutbox) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        outbox.tick()


# With more pending changes they are dropped, and the worker publishes all its blocks again.
MAX_PENDING_BLOCKS = 65_536
# The upper bound of changes in one call.
MAX_PUBLISHED_BLOCKS = 4096
# The pause between calls, which lets a busy worker send many changes in one call. The changes are not urgent.
BEHIND_S = 0.05
FORGET_TIMEOUT_S = 2.0


class BlockPublisher:
    """A publisher of the reusable blocks of one worker and model."""

    def __init__(self, index: KvIndex, model: str, worker_id: str, *, lease_ms: int) -> None:
        self._index = index
        self._model = model
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        # Bounded by the number of blocks in the engine's pool.
        self._held: set[bytes] = set()
        self._pending: dict[bytes, bool] = {}
        self._anew = False
        """True if the worker's entries must be written again because changes were dropped."""
        self._wake = asyncio.Event()

    def on_event(self, event: EngineEvent) -> None:
        """Record an event's changes. A block's last change replaces its earlier ones."""
        self._held.update(event.blocks.stored)
        self._held.difference_update(event.blocks.removed)
        for held, hashes in ((True, event.blocks.stored), (False, event.blocks.removed)):
            for block_hash in hashes:
                self._pending.pop(block_hash, None)
                self._pending[block_hash] = held
        if len(self._pending) > MAX_PENDING_BLOCKS:
            log.warning("KV index is behind and is rewritten", pending=len(self._pending), held=len(self._held))
            self._pending.clear()
            self._anew = True
        if self._pending or self._anew:
            self._wake.set()

    async def run(self) -> None:
        """Remove this worker's entries, then publish changes and renew the lease until cancelled."""
        await self._index.forget(self._model, self._worker_id)
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time()
        while True:
            if loop.time() >= renew_at_s:
                await self._index.renew(self._model, self._worker_id, lease_ms=self._lease_ms)
                renew_at_s = loop.time() + self._lease_ms / 1000 / RENEWALS_PER_LEASE
            try:
                async with asyncio.timeout_at(renew_at_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await self._publish()
            await asyncio.sleep(BEHIND_S)

    async def forget(self) -> None:
        """Remove this worker's entries. If the index is away, their lease expires by itself."""
        try:
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self._index.forget(self._model, self._worker_id)
        except TimeoutError:
            return

    async def _publish(self) -> None:
        if self._anew:
            await self._publish_all()
            return
        batch = list(islice(self._pending.items(), MAX_PUBLISHED_BLOCKS))
        for block_hash, _ in batch:
            del self._pending[block_hash]
        if not self._pending:
            self._wake.clear()
        stored = [block_hash for block_hash, held in batch if held]
        removed = [block_hash for block_hash, held in batch if not held]
        await self._index.publish(self._model, self._worker_id, stored=stored, removed=removed)

    async def _publish_all(self) -> None:
        self._anew = False
        self._pending.clear()
        self._wake.clear()
        held = list(self._held)
        await self._index.forget(self._model, self._worker_id)
        await self._index.publish(self._model, self._worker_id, stored=held, removed=())
