"""Pulls of KV blocks from other workers, over gRPC or out of the sender's mapped memory.

The stream is the same in both cases. It opens pulls, reports which blocks are ready while the prompt is computed, and
sends the acknowledgements. If sender and receiver share memory, chunks contain block numbers instead of bytes. To prove
that it shares memory, the receiver opens the file of the sender's pool and sends the nonce found there.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError, KvLost, KvMismatch
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.kv_shared_pool import PoolMap, PoolMaps, sweep
from libs.runtime.backoff import Backoff
from libs.runtime.tasks import OnFailure, TaskOwner, until_first
from libs.runtime.transport import Transport
from libs.worker import kv_wire
from libs.worker.kv_wire import WINDOW_BYTES

log = structlog.get_logger()

MAX_SILENT_TICKS = 5


class Pull:
    """The received chunks of one pull that the engine has not read. They are bounded by the sender's window.

    A sender that exceeds the window fails the pull.
    """

    def __init__(self, number: int, awaited_blocks: int) -> None:
        self.number = number
        self._silent_ticks = 0
        self._awaited_blocks = awaited_blocks
        self._chunks: deque[tuple[pb.KvChunk, memoryview]] = deque()
        self._unread_bytes = 0
        self._taken_bytes = 0
        """The number of bytes that were read and not yet reported to the sender."""
        self._last = False
        self._error: FulcrumError | None = None
        self._news = asyncio.Event()

    async def next(self) -> tuple[pb.KvChunk, memoryview]:
        """Return the next chunk with its data. Raise the error that ended the pull."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        chunk, data = self._chunks.popleft()
        self._unread_bytes -= data.nbytes
        self._taken_bytes += data.nbytes
        return chunk, data

    def put(self, chunk: pb.KvChunk, data: memoryview) -> None:
        """Queue a received chunk. The engine checks its blocks and their order."""
        self._silent_ticks = 0
        if self._last or self._error is not None:
            return
        self._awaited_blocks -= chunk.blocks
        if self._unread_bytes >= WINDOW_BYTES or self._awaited_blocks < 0 or not (chunk.blocks or chunk.last):
            self.fail(KvLost("the sender sends more than was asked for"))
        elif chunk.last and self._awaited_blocks:
            self.fail(KvLost(f"the sender ended the pull {self._awaited_blocks} blocks too early"))
        else:
            self._unread_bytes += data.nbytes
            self._last = chunk.last
            self._chunks.append((chunk, data))
            self._news.set()

    def ready(self, blocks: int) -> None:
        """Record that the sender has more blocks ready. At most one such notice is queued."""
        self._silent_ticks = 0
        reported = bool(self._chunks) and not self._chunks[-1][0].blocks
        if not (self._last or self._error is not None or reported):
            self._chunks.append((pb.KvChunk(pull=self.number, ready_blocks=blocks), memoryview(b"")))
            self._news.set()

    def alive(self) -> None:
        self._silent_ticks = 0

    def tick(self) -> None:
        """Advance time by one tick. Fail the pull if its queue is empty and the sender has been silent for too long."""
        self._silent_ticks = 0 if self._chunks else self._silent_ticks + 1
        if self._silent_ticks > MAX_SILENT_TICKS:
            self.fail(KvLost("the sender does not answer"))

    def fail(self, error: FulcrumError) -> None:
        """End the pull with an error, unless its last chunk has arrived."""
        if not self._last and self._error is None:
            self._error = error
            self._news.set()

    def take_report(self) -> int:
        """Return the bytes read since the last report; 0 while they are less than half a window."""
        taken_bytes = self._taken_bytes
        if taken_bytes < WINDOW_BYTES // 2:
            return 0
        self._taken_bytes = 0
        return taken_bytes


BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
TICK_S = 1.0
# The upper bound of the search for the reason why a stream broke. Its pulls fail only afterwards.
STATUS_S = 0.2
HIDDEN = "Internal error from Core"
CLOSED = "the stream to it was closed"
# The upper bound of the delay of an acknowledgement, which otherwise goes with the next frame. It delays no sequence;
# the sender only holds the blocks for longer.
ACK_DELAY_S = 0.01


class PullStream:
    """The stream to one sender. All methods but `run` are synchronous and only queue messages for the next frame."""

    def __init__(self, address: str, *, receiver_id: str, transport: Transport) -> None:
        self._address = address
        self._receiver_id = receiver_id
        self._transport = transport
        self._pulls: dict[int, Pull] = {}
        self._numbers = count(1)
        self._opens: dict[int, pb.PullOpen] = {}
        self._taken: list[pb.PullTaken] = []
        self._acks: list[int] = []
        self._cancels: list[int] = []
        self._wanted = asyncio.Event()
        self._wake = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._silent_ticks = 0

    @property
    def idle(self) -> bool:
        """True if no pull is open and no message is queued."""
        return not (self._pulls or self._acks or self._cancels)

    def open(self, request: pb.PullOpen, blocks: int) -> Pull:
        pull = Pull(next(self._numbers) & 0xFFFFFFFF, blocks)
        request.pull = pull.number
        self._pulls[pull.number] = pull
        self._opens[pull.number] = request
        self._wanted.set()
        self._wake.set()
        return pull

    def taken(self, pull: Pull) -> None:
        """Report the bytes read from a pull once they are enough for the sender to continue."""
        if sent_bytes := pull.take_report():
            self._taken.append(pb.PullTaken(pull=pull.number, sent_bytes=sent_bytes))
            self._wake.set()

    def leave(self, pull: Pull, *, whole: bool) -> None:
        """End a pull. If `whole`, all blocks have arrived and are acknowledged."""
        # The sender does not know a pull that is still among the opens, so it needs no acknowledgement or cancellation.
        if self._pulls.pop(pull.number, None) is None or self._opens.pop(pull.number, None) is not None:
            return
        if whole:
            self._acks.append(pull.number)
            if self._ack_timer is None:
                self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._wake.set)
        else:
            self._cancels.append(pull.number)
            self._wake.set()

    async def run(self) -> None:
        """Run the stream until cancelled. The first pull opens it, and so does the next one after a loss."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            await self._wanted.wait()
            reason = CLOSED
            try:
                await self._connect(backoff)
            except KvLost as error:
                reason = error.message
            finally:
                self._reset(reason)
            wait_s = backoff.next_s()
            log.info("KV stream ended", address=self._address, reason=reason)
            await asyncio.sleep(wait_s)

    async def _connect(self, backoff: Backoff) -> None:
        # A channel's own back-off is longer than this one, so each attempt gets a new channel.
        async with self._transport.channel(self._address) as channel:
            stream = _pull_method(channel)(metadata=self._transport.metadata(self._address))
            try:
                await until_first(read=self._read(stream, backoff), write=self._write(stream), tick=self._tick())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                raise KvLost(await self._reason(channel, stream)) from None
            finally:
                stream.cancel()

    async def _reason(self, channel: grpc.aio.Channel, stream: Any) -> str:
        """Return the reason why the sender ended the stream.

        If the stream ends during a write, gRPC reports a text of its own instead of the status (grpc/aio/_call.py). A
        second stream without a write then shows the reason.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                if (details := await stream.details()) != HIDDEN:
                    return details or str((await stream.code()).name)
                silent = _pull_method(channel)(metadata=self._transport.metadata(self._address))
                try:
                    await silent.read()
                except grpc.aio.AioRpcError as error:
                    return error.details() or error.code().name
                finally:
                    silent.cancel()
        return CLOSED

    async def _read(self, stream: Any, backoff: Backoff) -> None:
        while (raw := await stream.read()) is not grpc.aio.EOF:
            self._silent_ticks = 0
            self._take(*kv_wire.decode(raw))
            backoff.reset()

    async def _write(self, stream: Any) -> None:
        """Write one frame with everything queued since the last one, whenever something is queued."""
        receiver_id = self._receiver_id
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame = self._take_frame()
            if frame.ByteSize():
                frame.receiver_id, receiver_id = receiver_id, ""
                await stream.write(frame)

    async def _tick(self) -> None:
        """Fail pulls whose sender is silent. Raise KvLost if the sender is silent on the whole stream."""
        while self._silent_ticks <= MAX_SILENT_TICKS:
            await asyncio.sleep(TICK_S)
            self._silent_ticks = self._silent_ticks + 1 if self._pulls else 0
            for pull in self._pulls.values():
                pull.tick()
        raise KvLost("the sender does not answer")

    def _take_frame(self) -> pb.PullFrame:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        frame = pb.PullFrame(opens=self._opens.values(), taken=self._taken)
        if self._acks:
            frame.acks = pack_u32(self._acks)
        if self._cancels:
            frame.cancels = pack_u32(self._cancels)
        for sent in (self._opens, self._taken, self._acks, self._cancels):
            sent.clear()
        return frame

    def _take(self, frame: pb.KvFrame, data: memoryview) -> None:
        for chunk, part in kv_wire.parts(frame, data):
            if (pull := self._pulls.get(chunk.pull)) is not None:
                pull.put(chunk, part)
        for ready in frame.ready:
            if (pull := self._pulls.get(ready.pull)) is not None:
                pull.ready(ready.blocks)
        for failed in frame.failed:
            if (pull := self._pulls.get(failed.pull)) is not None:
                pull.fail(_error(failed))
        for number in kv_wire.numbers(frame.alive):
            if (pull := self._pulls.get(number)) is not None:
                pull.alive()

    def _reset(self, reason: str) -> None:
        """Fail the pulls of a lost stream. Pulls that were not sent yet move to the next stream."""
        unrequested = dict(self._opens)
        for number, pull in self._pulls.items():
            if number not in unrequested:
                pull.fail(KvLost(reason))
        self._take_frame()
        self._pulls = {number: self._pulls[number] for number in unrequested}
        self._opens.update(unrequested)
        self._silent_ticks = 0
        for event in (self._wanted, self._wake):
            event.set() if unrequested else event.clear()


def _error(failed: pb.PullFailed) -> FulcrumError:
    mismatch = failed.failure == pb.PULL_FAILURE_KV_MISMATCH
    return KvMismatch(failed.detail) if mismatch else KvLost(failed.detail)


def _pull_method(channel: grpc.aio.Channel) -> Any:
    """Return KvService.Pull with frames as raw bytes, for `kv_wire`."""
    method = pb.DESCRIPTOR.services_by_name["KvService"].methods_by_name["Pull"]
    return channel.stream_stream(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=pb.PullFrame.SerializeToString,
        response_deserializer=None,
    )


# Bounds the time for which a killed worker's pool occupies memory while another worker runs on its host.
SWEEP_S = 5.0


class SharedMemory:
    """The pools of other workers that this one has mapped, and the sweep of files without an owner."""

    def __init__(self, folder: Path | None) -> None:
        """Sweep once, which makes room for a new pool, and create the maps. Share nothing without a folder."""
        self._folder = folder
        self.maps = PoolMaps(folder) if folder else None
        self._sweep()

    async def run(self) -> None:
        """Sweep every `SWEEP_S` until cancelled, if a folder is shared."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep()

    def close(self) -> None:
        if self.maps is not None:
            self.maps.close()

    def _sweep(self) -> None:
        if self._folder is None or self.maps is None:
            return
        self.maps.drop_unowned()
        if removed := sweep(self._folder):
            log.info("removed KV pools of workers that have ended", files=removed)


# The upper bound of open streams. Streams with a pull are not closed for it.
MAX_LINKS = 64


class GrpcKvFetcher:
    def __init__(
        self,
        transport: Transport,
        receiver_id: str,
        maps: PoolMaps | None = None,
        *,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Create the fetcher. Without `maps`, all bytes are sent over gRPC."""
        self._transport = transport
        self._receiver_id = receiver_id
        self._maps = maps
        self._tasks = TaskOwner(on_failure)
        self._links: OrderedDict[str, tuple[PullStream, asyncio.Task[None]]] = OrderedDict()

    async def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncGenerator[KvChunk, None]:
        """Yield chunks in order from block `from_block` on. Reaching the end acknowledges them.

        Raise KvLost if the source is gone or breaks the protocol, KvMismatch if layouts differ.
        """
        pool = self._maps.get(handle.worker_id, handle.incarnation) if self._maps is not None else None
        request = pb.PullOpen(
            handle=handle.opaque,
            incarnation=handle.incarnation,
            kv_layout=kv_layout,
            from_block=from_block,
            shared_nonce=pool.nonce if pool else b"",
            named=handle.named,
        )
        link = self._link(handle.address)
        pull = link.open(request, handle.blocks - from_block)
        whole = False
        try:
            while not whole:
                message, data = await pull.next()
                if message.blocks or message.ready_blocks:
                    yield received_chunk(message, data, pool)
                    link.taken(pull)
                whole = message.last
        except KvLost as error:
            raise KvLost(f"{handle.worker_id} at {handle.address}: {error.message}") from None
        finally:
            link.leave(pull, whole=whole)

    async def close(self) -> None:
        self._links.clear()
        await self._tasks.close()

    def _link(self, address: str) -> PullStream:
        if address in self._links:
            self._links.move_to_end(address)
            return self._links[address][0]
        if len(self._links) >= MAX_LINKS:
            spare = next((key for key, (link, _) in self._links.items() if link.idle), None)
            if spare is not None:
                self._links.pop(spare)[1].cancel()
        link = PullStream(address, receiver_id=self._receiver_id, transport=self._transport)
        self._links[address] = link, self._tasks.spawn(f"KV from {address}", link.run())
        return link


def received_chunk(message: pb.KvChunk, data: memoryview, pool: PoolMap | None) -> KvChunk:
    """Convert a chunk without a copy. Its views show the message, or the sender's pool."""
    shared = bool(message.pool_blocks)
    if shared and pool is None:
        raise KvLost("the sender names blocks of a pool that is not mapped here")
    views = tuple(map(pool.block, message.pool_blocks)) if pool and shared else kv_wire.split(data, message.blocks)
    return KvChunk(
        first_block=message.first_block,
        blocks=message.blocks,
        data=views,
        data_bytes=message.data_bytes,
        checksums=tuple(message.checksums),
        pool_blocks=tuple(message.pool_blocks),
        ready_blocks=message.ready_blocks,
        shared=shared,
        token_ids=tuple(kv_wire.numbers(message.token_ids)),
        waited_ns=message.waited_ns,
    )
