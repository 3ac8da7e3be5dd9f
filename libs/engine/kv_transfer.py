"""KV blocks in and out of a pool, in chunks of bounded size."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import numpy as np

from libs.contracts.errors import KvLost
from libs.engine.checksum import block_checksum
from libs.engine.handles import Held, Received
from libs.engine.port import Capabilities, KvChunk, KvFetcher, KvHandle
from libs.engine.runner import Runner

MAX_CHUNK_BYTES = 1024 * 1024
"""Bound of one chunk that is sent, so that transfers take turns; a single larger block still goes as one."""
MAX_IN_PLACE_BYTES = 8 * 1024 * 1024
"""Bound of one chunk that is read in place: with its checksums it holds the sender's event loop for a millisecond."""
FIRST_IN_PLACE_BYTES = 2 * 1024 * 1024
"""The first chunk is small, so that the receiver begins early; each later one is twice as large, up to the bound."""
MAX_WRITE_BYTES = 2 * 1024 * 1024
"""So much is copied and checked at a time; the event loop runs in between. A single larger block still goes as one."""


class BlockExport:
    """A `KvExport` of a handle's blocks, in order, as far as they are ready."""

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
        """`held` is asked for each chunk and raises KvLost when there is no such handle any more.

        `waits` is called where no block is ready, `left` once at the end.
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
        """The next blocks that are ready; None while there are none."""
        handle = self._held()
        first = self._next
        end = min(first + max(self._chunk_bytes // self._block_bytes, 1), handle.ready)
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
            checksums=tuple(map(block_checksum, data)),
            pool_blocks=tuple(part),
        )

    def close(self) -> None:
        """The receiver has left. Idempotent."""
        if not self._closed:
            self._closed = True
            self._left()


async def receive_blocks(
    runner: Runner,
    capabilities: Capabilities,
    fetcher: KvFetcher,
    handle: KvHandle,
    *,
    blocks: list[int],
    found: int,
) -> Received:
    """Write a handle's blocks into the pool as they come, but for the first `found`, which are there already.

    Raises KvLost when they are not all there or not what was sent, KvMismatch when they are of another layout.
    """
    received, at, unbroken_bytes = Received(), found, 0
    chunks = fetcher.fetch(handle, capabilities.kv_layout, found)
    try:
        async for chunk in chunks:
            end = at + chunk.blocks
            if chunk.first_block != at or end > handle.blocks:
                raise KvLost(f"blocks {chunk.first_block}+{chunk.blocks} came where {at} of {handle.blocks} were")
            if chunk.data_bytes != chunk.blocks * capabilities.kv_block_bytes:
                raise KvLost(f"{chunk.blocks} KV blocks weigh {chunk.data_bytes} bytes")
            unbroken_bytes = await _write(runner, capabilities, blocks[at:end], chunk, unbroken_bytes)
            at, received.blocks = end, received.blocks + chunk.blocks
            received.data_bytes += chunk.data_bytes
            received.shared = chunk.shared
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()  # a generator left early would keep its connection until it is collected
    if at != handle.blocks or at * capabilities.block_size_tokens < handle.tokens:
        raise KvLost(f"{at} KV blocks came for {handle.tokens} tokens in {handle.blocks} blocks")
    return received


async def _write(
    runner: Runner, capabilities: Capabilities, blocks: list[int], chunk: KvChunk, unbroken_bytes: int
) -> int:
    """A chunk into `blocks`, a slice at a time. Once cancelled it writes no more.

    `unbroken_bytes` were written since the event loop last ran; returns how many are by now.
    """
    step = max(MAX_WRITE_BYTES // capabilities.kv_block_bytes, 1)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        unbroken_bytes += len(part) * capabilities.kv_block_bytes
        if unbroken_bytes > MAX_WRITE_BYTES:
            await asyncio.sleep(0)
            unbroken_bytes = len(part) * capabilities.kv_block_bytes
        within = slice(start, start + step)
        runner.write_blocks(np.array(part, dtype=np.int32), chunk.data[within], chunk.checksums[within])
    await runner.transfer(chunk.data_bytes)
    return unbroken_bytes
