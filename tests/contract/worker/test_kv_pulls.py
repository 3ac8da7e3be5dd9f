"""Tests of many pulls over one stream between two workers: fair, bounded and ended independently."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio
import pytest
from numpy.typing import NDArray

from libs.contracts.errors import KvLost, KvMismatch
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_blocks import Offer
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.kv_transfer import MAX_CHUNK_BYTES, BlockExport, block_checksum
from libs.engine.port import Capabilities
from libs.runtime.net.access import Metadata
from libs.runtime.net.ports import held_port
from libs.runtime.net.rpc import make_channel, make_server
from libs.runtime.settings import CommonSettings
from libs.testing.wait import until
from libs.worker import kv_client, kv_server
from libs.worker.kv_client import GrpcKvFetcher
from libs.worker.kv_server import KvOutbox, KvServicer
from libs.worker.kv_wire import MAX_FRAME_BYTES, WINDOW_BYTES

BLOCK_BYTES = 64 * 1024
LAYOUT = "layout"
WAIT_S = 20.0
LARGE = 64 * WINDOW_BYTES // BLOCK_BYTES
"""The number of blocks of a prompt that fits no window."""


class Sender:
    """Prompts of a worker with a scripted number of ready blocks, in place of its host and its engine."""

    capabilities = Capabilities(
        block_size_tokens=16, kv_blocks=0, kv_block_bytes=BLOCK_BYTES, max_context_tokens=0, max_sequences=0,
        kv_layout=LAYOUT,
    )  # fmt: skip

    def __init__(self, address: str = "") -> None:
        self.address = address
        self.released: Counter[bytes] = Counter()
        self.readers: Counter[bytes] = Counter()
        self.taken: Counter[int] = Counter()
        """The number of reads of each pool block."""
        self._held: dict[bytes, Offer] = {}
        self._waiting: set[Callable[[], None]] = set()

    @property
    def engine(self) -> "Sender":
        return self

    def prompt(self, name: str, blocks: int, *, ready: int | None = None) -> KvHandle:
        """Add a prompt whose blocks are all ready unless `ready` gives their number."""
        opaque, first = name.encode(), sum(len(held.blocks) for held in self._held.values())
        numbers = list(range(first, first + blocks))
        self._held[opaque] = Offer(opaque, 0, numbers, blocks if ready is None else ready, 1 if ready is None else None)
        return KvHandle("prefill-0", 1, self.address, opaque, 16 * blocks, blocks, LAYOUT)

    def ready(self, handle: KvHandle, blocks: int) -> None:
        held = self._held[handle.opaque]
        held.ready = blocks
        held.expires_ns = 1 if blocks == len(held.blocks) else None
        self._notify()

    def give_up(self, handle: KvHandle) -> None:
        del self._held[handle.opaque]
        self._notify()

    def expected(self, handle: KvHandle) -> list[bytes]:
        return [self._block(number) for number in self._held[handle.opaque].blocks]

    def export(
        self,
        opaque: bytes,
        kv_layout: str,
        from_block: int,
        *,
        news: Callable[[], None],
        in_place: bool = False,
        named: bool = False,
    ) -> BlockExport:
        if kv_layout != LAYOUT:
            raise KvMismatch("another layout")
        self._find(opaque)
        self.readers[opaque] += 1
        return BlockExport(
            cast(Any, self), self.capabilities, from_block, in_place=in_place, offer=lambda: self._find(opaque),
            waits=lambda: self._waiting.add(news), left=lambda: self.readers.subtract([opaque]),
        )  # fmt: skip

    def read_blocks(self, blocks: NDArray[Any]) -> tuple[memoryview, ...]:
        self.taken.update(blocks.tolist())
        return tuple(memoryview(self._block(number)) for number in blocks.tolist())

    def acknowledged(self, opaque: bytes) -> None:
        self.released[opaque] += 1

    def _find(self, opaque: bytes) -> Offer:
        if opaque not in self._held:
            raise KvLost("no such handle")
        return self._held[opaque]

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for news in waiting:
            news()

    def _block(self, number: int) -> bytes:
        return number.to_bytes(4, "little") * (BLOCK_BYTES // 4)


class Served:
    """A sender behind gRPC that can go away and come back, and a receiver's end of it."""

    def __init__(self, port: int) -> None:
        self.sender = Sender(f"127.0.0.1:{port}")
        self.connections = 0
        self.ending: Callable[[], None] = lambda: None
        """Called while a connection closes, before its pulls are notified."""
        self.fetcher = GrpcKvFetcher(cast(Any, self), "decode-0")
        self._server: grpc.aio.Server | None = None
        self.servicer: KvServicer | None = None

    async def start(self) -> None:
        self._server, _ = make_server(CommonSettings(), self.sender.address)
        self.servicer = KvServicer(cast(Any, self.sender), 1)
        self.servicer.add_to(self._server)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def blocks(self, handle: KvHandle, from_block: int = 0, layout: str = LAYOUT) -> list[bytes]:
        """Return all blocks of a handle, checked."""
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            async for chunk in self.fetcher.fetch(handle, layout, from_block):
                assert chunk.first_block == from_block + len(found)
                assert chunk.checksums == tuple(map(block_checksum, chunk.data))
                found += map(bytes, chunk.data)
        return found

    def metadata(self, _address: str) -> Metadata:
        return ()

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        self.connections += 1
        try:
            async with make_channel(CommonSettings(), address) as channel:
                yield channel
        finally:
            self.ending()
            await asyncio.sleep(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    with held_port() as port:
        served = Served(port)
        await served.start()
        yield served
        await served.fetcher.close()
        await until(lambda: not +served.sender.readers, what="no reader left")
        await served.stop()


async def begin(served: Served, handle: KvHandle) -> AsyncGenerator[KvChunk, None]:
    """Open a pull and read its first chunk only."""
    chunks = served.fetcher.fetch(handle, LAYOUT, 0)
    async with asyncio.timeout(WAIT_S):
        await anext(chunks)
    return chunks


async def test_many_pulls_share_one_stream_and_each_receives_its_own_blocks(served: Served) -> None:
    handles = [served.sender.prompt(f"prompt {number}", 1 + number % 7) for number in range(60)]
    handles.append(served.sender.prompt("large", 3 * WINDOW_BYTES // BLOCK_BYTES))
    found = await asyncio.gather(*map(served.blocks, handles))
    assert found == [served.sender.expected(handle) for handle in handles]
    assert served.connections == 1
    await until(lambda: served.sender.released == Counter(handle.opaque for handle in handles), what="acks")


async def test_an_empty_pull_and_a_pull_from_the_middle_end_with_an_ack(served: Served) -> None:
    handle = served.sender.prompt("prompt", 5)
    assert await served.blocks(handle, 5) == []
    assert await served.blocks(handle, 3) == served.sender.expected(handle)[3:]
    await until(lambda: served.sender.released[handle.opaque] == 2, what="both acks")


async def test_an_error_of_one_pull_does_not_end_the_others(served: Served) -> None:
    sender = served.sender
    slow = sender.prompt("slow", 4, ready=1)
    given_up = sender.prompt("given up", 4, ready=1)
    good = await begin(served, slow)
    doomed = await begin(served, given_up)
    with pytest.raises(KvMismatch):
        await served.blocks(sender.prompt("other layout", 1), layout="another")
    with pytest.raises(KvLost, match="no such handle"):
        await served.blocks(KvHandle("prefill-0", 1, sender.address, b"unknown", 16, 1))
    with pytest.raises(KvLost, match="restarted"):
        await served.blocks(KvHandle("prefill-0", 2, sender.address, slow.opaque, 16, 1))
    with pytest.raises(KvLost, match="too early"):
        await served.blocks(KvHandle("prefill-0", 1, sender.address, sender.prompt("short", 2).opaque, 48, 3))
    with pytest.raises(KvLost, match="more than"):
        await served.blocks(KvHandle("prefill-0", 1, sender.address, sender.prompt("long", 2).opaque, 16, 1))
    sender.give_up(given_up)
    with pytest.raises(KvLost, match="no such handle"):
        await anext(doomed)
    sender.ready(slow, 4)
    assert sum([chunk.blocks async for chunk in good]) == 3
    assert served.connections == 1


async def test_a_receiver_slow_with_one_pull_gets_a_window_of_it_and_all_of_the_others(
    served: Served,
) -> None:
    large = served.sender.prompt("large", LARGE)
    stuck = await begin(served, large)
    small = [served.sender.prompt(f"small {number}", 2) for number in range(5)]
    assert await asyncio.gather(*map(served.blocks, small)) == [served.sender.expected(handle) for handle in small]
    read = sum(served.sender.taken[number] for number in range(LARGE))
    assert read * BLOCK_BYTES <= WINDOW_BYTES + MAX_CHUNK_BYTES
    blocks = 16 + sum([chunk.blocks async for chunk in stuck])
    assert blocks == LARGE


async def test_a_cancelled_pull_is_freed_at_once_and_the_others_continue(served: Served) -> None:
    large, slow = served.sender.prompt("large", LARGE), served.sender.prompt("slow", 2, ready=1)
    chunks, other = await begin(served, large), await begin(served, slow)
    waiting = asyncio.create_task(served.blocks(served.sender.prompt("never", 2, ready=0)))
    await until(lambda: sum(served.sender.readers.values()) == 3, what="three readers")
    await chunks.aclose()
    waiting.cancel()
    await until(lambda: +served.sender.readers == Counter({slow.opaque: 1}), what="one reader")
    served.sender.ready(slow, 2)
    assert [chunk.blocks async for chunk in other] == [1]
    await until(lambda: +served.sender.released == Counter({slow.opaque: 1}), what="one ack")


async def test_a_cut_stream_loses_all_its_pulls_and_the_next_pull_reconnects(served: Served) -> None:
    sender = served.sender
    pulls = [asyncio.create_task(served.blocks(sender.prompt(f"slow {number}", 2, ready=1))) for number in range(8)]
    whole = sender.prompt("whole", LARGE)
    stuck = await begin(served, whole)
    await until(lambda: served.servicer is not None and served.servicer.pulls == 9, what="all pulls at the sender")
    await served.stop()
    lost = await asyncio.wait_for(asyncio.gather(*pulls, return_exceptions=True), WAIT_S)
    assert all(isinstance(error, KvLost) and sender.address in error.message for error in lost)
    with pytest.raises(KvLost):
        async for _ in stuck:
            pass
    assert not +sender.readers
    with pytest.raises(KvLost):
        await served.blocks(whole)  # nothing listens there
    await served.start()
    assert await served.blocks(whole) == sender.expected(whole)
    assert served.connections <= 4  # connections are attempted only for pulls


async def test_a_pull_requested_while_a_silent_stream_ends_uses_the_next_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_client, "TICK_S", 0.02)  # its keepalives are too far apart now
    chunks = await begin(served, served.sender.prompt("slow", 2, ready=1))
    whole = served.sender.prompt("whole", 3)
    calls: list[asyncio.Task[list[bytes]]] = []
    served.ending = lambda: calls or calls.append(asyncio.create_task(served.blocks(whole)))
    with pytest.raises(KvLost, match="does not answer"):
        await anext(chunks)
    await until(lambda: calls, what="the end of the stream")
    assert await calls[0] == served.sender.expected(whole)
    assert served.connections == 2


async def test_a_sender_that_shuts_down_ends_its_streams(served: Served) -> None:
    handle = served.sender.prompt("slow", 2, ready=1)
    chunks = await begin(served, handle)
    assert served.servicer is not None
    served.servicer.hang_up()
    with pytest.raises(KvLost):
        await anext(chunks)


async def test_a_silent_sender_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_client, "TICK_S", 0.02)  # its keepalives are too far apart now
    chunks = await begin(served, served.sender.prompt("slow", 2, ready=1))
    with pytest.raises(KvLost, match="does not answer"):
        await anext(chunks)


async def test_a_slow_prompt_is_not_mistaken_for_a_dead_sender(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_server, "TICK_S", 0.01)
    monkeypatch.setattr(kv_client, "TICK_S", 0.2)
    handle = served.sender.prompt("slow", 2, ready=1)
    chunks = await begin(served, handle)
    asyncio.get_running_loop().call_later(0.2 * (kv_client.MAX_SILENT_TICKS + 3), served.sender.ready, handle, 2)
    assert [chunk.blocks async for chunk in chunks] == [1]


# ---------------------------------------------------------------- the sender's decisions, without gRPC


def opened(sender: Sender, *names: tuple[str, int], has_room: bool = True) -> KvOutbox:
    outbox = KvOutbox(cast(Any, sender), 1, has_room=lambda: has_room, wake=lambda: None)
    ask(outbox, *(sender.prompt(name, blocks) for name, blocks in names))
    return outbox


def ask(outbox: KvOutbox, *handles: KvHandle) -> None:
    opens = [
        pb.PullOpen(pull=len(outbox) + number, handle=handle.opaque, incarnation=1, kv_layout=LAYOUT)
        for number, handle in enumerate(handles, 1)
    ]
    outbox.receive(pb.PullFrame(opens=opens))


def sent(outbox: KvOutbox) -> pb.KvFrame:
    frame = outbox.take_frame()
    return pb.KvFrame() if frame is None else pb.KvFrame.FromString(frame)


def test_small_finished_prompts_take_one_frame_together() -> None:
    outbox = opened(Sender(), *((f"prompt {number}", 2) for number in range(20)))
    assert [(chunk.pull, chunk.last) for chunk in sent(outbox).chunks] == [(pull, True) for pull in range(1, 21)]
    assert outbox.take_frame() is None


def test_pulls_alternate_and_frames_are_bounded() -> None:
    sender = Sender()
    outbox = opened(sender, ("one", LARGE), ("two", LARGE))
    for _ in range(8):
        frame = sent(outbox)
        assert len(frame.data) <= MAX_FRAME_BYTES + MAX_CHUNK_BYTES
        weights = Counter({chunk.pull: chunk.sent_bytes for chunk in frame.chunks})
        assert len(frame.data) == 0 or abs(weights[1] - weights[2]) <= MAX_CHUNK_BYTES
    assert outbox.take_frame() is None  # both windows are full
    ask(outbox, sender.prompt("small", 1))
    assert [chunk.pull for chunk in sent(outbox).chunks] == [3]
    outbox.receive(pb.PullFrame(taken=[pb.PullTaken(pull=2, sent_bytes=WINDOW_BYTES)]))
    assert {chunk.pull for chunk in sent(outbox).chunks} == {2}


def test_a_worker_without_room_refuses_the_pull() -> None:
    (failed,) = sent(opened(Sender(), ("prompt", 1), has_room=False)).failed
    assert failed.failure == pb.PULL_FAILURE_KV_LOST and "maximum number of transfers" in failed.detail


def test_a_receiver_that_does_not_acknowledge_in_time_is_given_up_and_a_waiting_one_is_not() -> None:
    sender = Sender()
    outbox = opened(sender, ("never acknowledged", 1), ("never taken", LARGE))
    slow = sender.prompt("slow", 2, ready=1)
    ask(outbox, slow)
    failed: list[int] = []
    for tick in range(kv_server.MAX_SILENT_TICKS + 2):
        frame = sent(outbox)
        failed += [each.pull for each in frame.failed]
        assert tick < 2 or frame.alive  # the slow one
        outbox.tick()
    assert sorted(failed) == [1, 2] and +sender.readers == Counter({slow.opaque: 1})
    outbox.close()
    assert not +sender.readers
