"""The transfer of KV blocks into and out of a pool, in chunks of bounded size.

Threads copy blocks and compute checksums, so the event loop stays free and more than one core is used.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import xxhash

from libs.contracts.errors import KvLost
from libs.engine.kv_blocks import Offer, ReceivedTotals
from libs.engine.kv_port import KvChunk, KvFetcher, KvHandle
from libs.engine.port import Capabilities
from libs.engine.runner import Runner
from libs.runtime.linux import USUAL_SLICE_NS, ask_slice

# Threads per engine. Two cores copy nearly twice as fast as one.
COPY_THREADS = 2
# The bytes that a thread copies or sums at a time. `stop` waits for one slice, about 2 ms. With smaller slices, a fifth
# of the time would go into handing work to threads.
SLICE_BYTES = 8 * 1024 * 1024
# A chunk up to this size is copied on the caller's thread, which takes no longer than waking another thread.
INLINE_BYTES = 256 * 1024


def block_checksum(data: memoryview) -> int:
    """Return the 64-bit XXH3 of a block. It is faster than a copy and runs without the interpreter's lock.

    It detects damage, and blocks that were overwritten during their copy. It is no defence against malicious peers;
    workers trust one another.
    """
    checksum = xxhash.xxh3_64()
    checksum.update(data)  # the one-shot function would not release the interpreter's lock
    return checksum.intdigest()


class BlockCopies:
    """The threads on which one engine copies blocks and computes checksums."""

    def __init__(self, runner: Runner, block_bytes: int) -> None:
        self._runner = runner
        self.slice_blocks = max(SLICE_BYTES // block_bytes, 1)
        """The number of blocks that a thread copies or sums at a time."""
        self._threads = ThreadPoolExecutor(
            COPY_THREADS, thread_name_prefix="kv-copy", initializer=ask_slice, initargs=(USUAL_SLICE_NS,)
        )

    def writer(self) -> "BlockWriter":
        return BlockWriter(self._runner, self._threads, self.slice_blocks)

    async def checksums(self, blocks: list[int]) -> list[int]:
        """Return the checksums of blocks of a pool in host memory. Nothing may write to the blocks meanwhile."""
        data = self._runner.read_blocks(np.array(blocks, dtype=np.int32))
        return await asyncio.get_running_loop().run_in_executor(self._threads, _checksums, data)

    def close(self) -> None:
        """Stop the threads after their current slices. Idempotent."""
        self._threads.shutdown(cancel_futures=True)


class BlockWriter:
    """A writer of one fetch's blocks into the pool, one chunk at a time."""

    def __init__(self, runner: Runner, threads: ThreadPoolExecutor, slice_blocks: int) -> None:
        self._runner = runner
        self._threads = threads
        self._slice_blocks = slice_blocks
        self._under_way: list[Future[None]] = []

    async def write(self, blocks: list[int], chunk: KvChunk) -> None:
        """Write a chunk into `blocks`. Raise the errors of `Runner.write_blocks`, after which no write is running."""
        if sum(view.nbytes for view in chunk.data) <= INLINE_BYTES:
            self._runner.write_blocks(np.array(blocks, dtype=np.int32), chunk.data, chunk.checksums)
            return
        self._under_way = [
            self._threads.submit(
                self._runner.write_blocks,
                np.array(blocks[start : start + self._slice_blocks], dtype=np.int32),
                chunk.data[start : start + self._slice_blocks],
                chunk.checksums[start : start + self._slice_blocks],
            )
            for start in range(0, len(blocks), self._slice_blocks)
        ]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, self._under_way))
        finally:
            self.stop()

    def stop(self) -> None:
        """Cancel pending writes and block until running ones have ended, so that the blocks can be freed. Idempotent.

        This takes at most as long as one slice.
        """
        wait([write for write in self._under_way if not write.cancel()])
        self._under_way = []


def _checksums(data: tuple[memoryview, ...]) -> list[int]:
    return [block_checksum(view) for view in data]


# The upper bound of a chunk that is sent, so that transfers take turns. A larger block is sent as one chunk.
MAX_CHUNK_BYTES = 1024 * 1024
# The upper bound of a chunk that is read in place and lacks checksums. Computing them occupies the sender's event loop
# for a millisecond. A chunk whose checksums are all known is unbounded.
MAX_IN_PLACE_BYTES = 8 * 1024 * 1024
# The first chunk is small, so that the receiver can start early. Each later one is twice as large, up to the bound.
FIRST_IN_PLACE_BYTES = 2 * 1024 * 1024


class BlockExport:
    """A `KvExport` that returns a handle's blocks in order as they become ready."""

    def __init__(
        self,
        runner: Runner,
        capabilities: Capabilities,
        from_block: int,
        *,
        in_place: bool,
        offer: Callable[[], Offer | None],
        waits: Callable[[], None],
        left: Callable[[], None],
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        """Create an export that begins at `from_block`.

        `offer` is called for each chunk. It returns None while the handle's prompt has not begun, and raises KvLost if
        the handle is gone. `waits` is called whenever no block is ready, and `left` once at the end. With `now_ns`,
        chunks report the total time without a ready block.
        """
        self.done = False
        self._runner = runner
        self._block_bytes = capabilities.kv_block_bytes
        self._next = from_block
        self._in_place = in_place
        self._chunk_bytes = FIRST_IN_PLACE_BYTES if in_place else MAX_CHUNK_BYTES
        self._offer = offer
        self._waits = waits
        self._left = left
        self._now_ns = now_ns
        self._waits_since_ns = self._waited_ns = 0
        self._closed = False

    def take(self) -> KvChunk | None:
        """Return the next ready blocks; None while no block is ready."""
        offer = self._offer()
        if offer is None:
            self._wait()
            return None
        first = self._next
        end = min(first + max(self._chunk_bytes // self._block_bytes, 1), offer.ready)
        if self._in_place:
            end = max(end, offer.unsummed(first))
        part = offer.blocks[first:end]
        self._next += len(part)
        self.done = offer.whole and self._next >= len(offer.blocks)
        if not part:
            if not self.done:
                self._wait()
            elif offer.token_ids:
                return KvChunk(first_block=first, blocks=0, ready_blocks=offer.ready, token_ids=offer.token_ids)
            return None
        data = self._runner.read_blocks(np.array(part, dtype=np.int32))
        if self._in_place or not data:
            self._chunk_bytes = min(2 * self._chunk_bytes, MAX_IN_PLACE_BYTES)
        return KvChunk(
            first_block=first,
            blocks=len(part),
            data=data,
            data_bytes=len(part) * self._block_bytes,
            checksums=_offer_checksums(offer, first, data),
            pool_blocks=tuple(part),
            ready_blocks=offer.ready,
            token_ids=offer.token_ids if self.done else (),
            waited_ns=self._waited(),
        )

    def _wait(self) -> None:
        self._waits()
        if self._now_ns is not None and not self._waits_since_ns:
            self._waits_since_ns = self._now_ns()

    def _waited(self) -> int:
        """Return the total time for which no block was ready, up to now; 0 if it is not measured."""
        if self._now_ns is None:
            return 0
        if self._waits_since_ns:
            self._waited_ns += max(self._now_ns() - self._waits_since_ns, 0)
            self._waits_since_ns = 0
        return max(self._waited_ns, 1)  # 0 would mean unknown

    @property
    def ready_blocks(self) -> int:
        """The number of leading blocks that are ready; 0 if all of them were taken. Raises KvLost like `take`."""
        offer = self._offer()
        return offer.ready if offer is not None and offer.ready > self._next else 0

    def close(self) -> None:
        """Record that the receiver has left. Idempotent."""
        if not self._closed:
            self._closed = True
            self._left()


async def receive_blocks(
    runner: Runner,
    writer: BlockWriter,
    capabilities: Capabilities,
    fetcher: KvFetcher,
    handle: KvHandle,
    *,
    blocks: list[int],
    found: int,
    on_ready: Callable[[bool], None] = lambda _: None,
) -> ReceivedTotals:
    """Write a handle's blocks into the pool as they arrive, except the first `found`, which the pool already has.

    `on_ready` receives True while the sender has ready blocks that have not arrived. Raise KvLost if blocks are missing
    or damaged, KvMismatch if they have another layout.
    """
    received, at = ReceivedTotals(), found
    chunks = fetcher.fetch(handle, capabilities.kv_layout, found)
    try:
        async for chunk in chunks:
            end = at + chunk.blocks
            on_ready(end > at or chunk.ready_blocks > at)
            received.token_ids = chunk.token_ids
            if not chunk.blocks:
                continue
            if chunk.first_block != at or end > handle.blocks:
                raise KvLost(f"blocks {chunk.first_block}+{chunk.blocks} came where {at} of {handle.blocks} were")
            if chunk.data_bytes != chunk.blocks * capabilities.kv_block_bytes:
                raise KvLost(f"{chunk.blocks} KV blocks weigh {chunk.data_bytes} bytes")
            received.waited_ns = max(chunk.waited_ns, received.waited_ns)
            if not received.blocks:
                received.first_waited_ns = received.waited_ns
            await writer.write(blocks[at:end], chunk)
            await runner.transfer(chunk.data_bytes)
            at, received.blocks = end, received.blocks + chunk.blocks
            received.data_bytes += chunk.data_bytes
            received.shared = chunk.shared
            on_ready(not chunk.ready_blocks or chunk.ready_blocks > at)
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()  # otherwise the generator would not close its connection until it is collected
    if at != handle.blocks or at * capabilities.block_size_tokens < handle.tokens:
        raise KvLost(f"{at} KV blocks came for {handle.tokens} tokens in {handle.blocks} blocks")
    return received


def _offer_checksums(offer: Offer, first: int, data: tuple[memoryview, ...]) -> tuple[int, ...]:
    """Return the checksums of blocks from `first` on, and compute the unknown ones."""
    for at, view in enumerate(data, first):
        if offer.checksums[at] is None:
            offer.checksums[at] = block_checksum(view)
    return tuple(found for found in offer.checksums[first : first + len(data)] if found is not None)
