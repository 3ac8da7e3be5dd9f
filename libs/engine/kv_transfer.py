"""KV blocks in and out of a pool, in chunks of bounded size."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

import numpy as np

from libs.contracts.errors import KvLost
from libs.engine.checksum import block_checksum
from libs.engine.handles import Held, Received
from libs.engine.port import Capabilities, KvChunk, KvFetcher, KvHandle
from libs.engine.runner import Runner

MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Bound of one chunk that is sent; a single larger block still goes as one."""
MAX_IN_PLACE_BYTES = 8 * 1024 * 1024
"""Bound of one chunk that is read in place: with its checksums it holds the sender's event loop for a millisecond."""
FIRST_IN_PLACE_BYTES = 2 * 1024 * 1024
"""The first chunk is small, so that the receiver begins early; each later one is twice as large, up to the bound."""
MAX_WRITE_BYTES = 2 * 1024 * 1024
"""So much is copied and checked at a time; the event loop runs in between. A single larger block still goes as one."""
SIGN_OF_LIFE_S = 1.0
"""While no block is ready an empty chunk goes so often, so that a slow prompt is not taken for a dead sender."""


async def send_blocks(
    runner: Runner,
    capabilities: Capabilities,
    held: Callable[[], Held],
    from_block: int,
    progress: Callable[[], Awaitable[object]],
    *,
    in_place: bool = False,
) -> AsyncGenerator[KvChunk, None]:
    """Chunks of a handle's blocks, in order, as far as they are ready; then after each `progress`, until it is whole.

    `held` is asked before each chunk and raises when there is no such handle any more.
    """
    chunk_bytes = FIRST_IN_PLACE_BYTES if in_place else MAX_CHUNK_BYTES
    first = from_block
    while True:
        handle = held()
        per_chunk = max(chunk_bytes // capabilities.kv_block_bytes, 1)
        part = handle.blocks[first : min(first + per_chunk, handle.ready)]
        if part:
            data = runner.read_blocks(np.array(part, dtype=np.int32))
            yield KvChunk(
                first_block=first,
                blocks=len(part),
                data=data,
                data_bytes=len(part) * capabilities.kv_block_bytes,
                checksums=tuple(map(block_checksum, data)),
                pool_blocks=tuple(part),
            )
            first += len(part)
            if in_place:
                chunk_bytes = min(2 * chunk_bytes, MAX_IN_PLACE_BYTES)
        elif handle.whole:
            return
        else:
            moved = False
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    moved = bool(await progress())
            if not moved:
                yield KvChunk(first, 0)


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
    received, at = Received(), found
    chunks = fetcher.fetch(handle, capabilities.kv_layout, found)
    try:
        async for chunk in chunks:
            if not chunk.blocks:
                continue
            end = at + chunk.blocks
            if chunk.first_block != at or end > handle.blocks:
                raise KvLost(f"blocks {chunk.first_block}+{chunk.blocks} came where {at} of {handle.blocks} were")
            if chunk.data_bytes != chunk.blocks * capabilities.kv_block_bytes:
                raise KvLost(f"{chunk.blocks} KV blocks weigh {chunk.data_bytes} bytes")
            await _write(runner, capabilities, blocks[at:end], chunk)
            at, received.blocks = end, received.blocks + chunk.blocks
            received.data_bytes += chunk.data_bytes
            received.shared = chunk.shared
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()  # a generator left early would keep its connection until it is collected
    if at != handle.blocks or at * capabilities.block_size_tokens < handle.tokens:
        raise KvLost(f"{at} KV blocks came for {handle.tokens} tokens in {handle.blocks} blocks")
    return received


async def _write(runner: Runner, capabilities: Capabilities, blocks: list[int], chunk: KvChunk) -> None:
    """A chunk into `blocks`, a slice at a time. Once cancelled it writes no more."""
    step = max(MAX_WRITE_BYTES // capabilities.kv_block_bytes, 1)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        runner.write_blocks(np.array(blocks[part], dtype=np.int32), chunk.data[part], chunk.checksums[part])
        await asyncio.sleep(0)
    await runner.transfer(chunk.data_bytes)
