"""Transfer of KV blocks in and out of a pool, in chunks of bounded size."""

from collections.abc import AsyncGenerator, Callable

import numpy as np

from libs.contracts.errors import KvLost
from libs.engine.kv.copy import BlockWriter, block_checksum
from libs.engine.kv.handles import Held, Received
from libs.engine.kv_port import KvChunk, KvFetcher, KvHandle
from libs.engine.port import Capabilities
from libs.engine.runner import Runner

# Upper bound of a chunk that is sent, so that transfers take turns. A single larger block still goes as one chunk.
MAX_CHUNK_BYTES = 1024 * 1024
# Upper bound of a chunk that is read in place and whose checksums are unknown. Computing them holds the sender's
# event loop for a millisecond. With known checksums a chunk has no bound.
MAX_IN_PLACE_BYTES = 8 * 1024 * 1024
# The first chunk is small, so that the receiver can begin early. Each later one is twice as large, up to the bound.
FIRST_IN_PLACE_BYTES = 2 * 1024 * 1024


class BlockExport:
    """A `KvExport` of a handle's blocks in order, as far as they are ready."""

    def __init__(
        self,
        runner: Runner,
        capabilities: Capabilities,
        from_block: int,
        *,
        in_place: bool,
        held: Callable[[], Held],
        waits: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        """Read from `from_block` on. `held` is called for each chunk, and raises KvLost if the handle is gone.

        `waits` is called whenever no block is ready, and `left` once at the end.
        """
        self.done = False
        self._runner = runner
        self._block_bytes = capabilities.kv_block_bytes
        self._next = from_block
        self._in_place = in_place
        self._chunk_bytes = FIRST_IN_PLACE_BYTES if in_place else MAX_CHUNK_BYTES
        self._held = held
        self._waits = waits
        self._left = left
        self._closed = False

    def take(self) -> KvChunk | None:
        """Return the next blocks that are ready; None while there are none."""
        handle = self._held()
        first = self._next
        end = min(first + max(self._chunk_bytes // self._block_bytes, 1), handle.ready)
        if self._in_place:
            end = max(end, handle.unsummed(first))
        part = handle.blocks[first:end]
        self._next += len(part)
        self.done = handle.whole and self._next >= len(handle.blocks)
        if not part:
            if not self.done:
                self._waits()
            return None
        data = self._runner.read_blocks(np.array(part, dtype=np.int32))
        if self._in_place or not data:
            self._chunk_bytes = min(2 * self._chunk_bytes, MAX_IN_PLACE_BYTES)
        return KvChunk(
            first_block=first,
            blocks=len(part),
            data=data,
            data_bytes=len(part) * self._block_bytes,
            checksums=_checksums(handle, first, data),
            pool_blocks=tuple(part),
            ready_blocks=handle.ready,
        )

    @property
    def ready_blocks(self) -> int:
        """Number of leading blocks that are ready; 0 if all of them were taken. Raises KvLost as `take` does."""
        ready = self._held().ready
        return ready if ready > self._next else 0

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
) -> Received:
    """Write a handle's blocks into the pool as they arrive. The first `found` blocks are there already and are
    skipped.

    `on_ready` is called with whether the sender has ready blocks that have not arrived here. Raise KvLost if blocks
    are missing or damaged, KvMismatch if they have another layout.
    """
    received, at = Received(), found
    chunks = fetcher.fetch(handle, capabilities.kv_layout, found)
    try:
        async for chunk in chunks:
            end = at + chunk.blocks
            on_ready(end > at or chunk.ready_blocks > at)
            if not chunk.blocks:
                continue
            if chunk.first_block != at or end > handle.blocks:
                raise KvLost(f"blocks {chunk.first_block}+{chunk.blocks} came where {at} of {handle.blocks} were")
            if chunk.data_bytes != chunk.blocks * capabilities.kv_block_bytes:
                raise KvLost(f"{chunk.blocks} KV blocks weigh {chunk.data_bytes} bytes")
            await writer.write(blocks[at:end], chunk)
            await runner.transfer(chunk.data_bytes)
            at, received.blocks = end, received.blocks + chunk.blocks
            received.data_bytes += chunk.data_bytes
            received.shared = chunk.shared
            on_ready(not chunk.ready_blocks or chunk.ready_blocks > at)
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()  # a generator left early would keep its connection until it is collected
    if at != handle.blocks or at * capabilities.block_size_tokens < handle.tokens:
        raise KvLost(f"{at} KV blocks came for {handle.tokens} tokens in {handle.blocks} blocks")
    return received


def _checksums(handle: Held, first: int, data: tuple[memoryview, ...]) -> tuple[int, ...]:
    """Return the checksums of blocks from `first` on, computing those that are unknown."""
    for at, view in enumerate(data, first):
        if handle.checksums[at] is None:
            handle.checksums[at] = block_checksum(view)
    return tuple(found for found in handle.checksums[first : first + len(data)] if found is not None)
