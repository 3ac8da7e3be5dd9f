"""KV blocks in and out of a pool, in chunks of bounded size."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress

import numpy as np

from libs.contracts.errors import KvLost
from libs.engine.handles import Held
from libs.engine.port import Capabilities, KvChunk, KvFetcher, KvHandle
from libs.engine.runner import Runner

MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Bound of one chunk on its way; a single larger block still goes as one."""
SIGN_OF_LIFE_S = 1.0
"""While no block is ready an empty chunk goes so often, so that a slow prompt is not taken for a dead sender."""


async def send_blocks(
    runner: Runner,
    capabilities: Capabilities,
    held: Callable[[], Held],
    from_block: int,
    progress: Callable[[], Awaitable[object]],
) -> AsyncIterator[KvChunk]:
    """Chunks of a handle's blocks, in order, as far as they are ready; then after each `progress`, until it is whole.

    `held` is asked before each chunk and raises when there is no such handle any more.
    """
    per_chunk = max(MAX_CHUNK_BYTES // capabilities.kv_block_bytes, 1)
    first = from_block
    while True:
        handle = held()
        part = handle.blocks[first : min(first + per_chunk, handle.ready)]
        if part:
            data = runner.read_blocks(np.array(part, dtype=np.int32))
            yield KvChunk(first, len(part), data, len(part) * capabilities.kv_block_bytes)
            first += len(part)
        elif handle.whole:
            return
        else:
            moved = False
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    moved = bool(await progress())
            if not moved:
                yield KvChunk(first, 0, b"", 0)


async def receive_blocks(
    runner: Runner, capabilities: Capabilities, fetcher: KvFetcher, handle: KvHandle, blocks: list[int]
) -> int:
    """Write a handle's blocks into the pool as they come; the bytes received.

    Raises KvLost when they are not all there, KvMismatch when they are of another layout.
    """
    received, data_bytes = 0, 0
    chunks = fetcher.fetch(handle, capabilities.kv_layout)
    try:
        async for chunk in chunks:
            if not chunk.blocks:
                continue
            end = received + chunk.blocks
            if chunk.first_block != received or end > handle.blocks:
                raise KvLost(f"blocks {chunk.first_block}+{chunk.blocks} came where {received} of {handle.blocks} were")
            if chunk.data_bytes != chunk.blocks * capabilities.kv_block_bytes:
                raise KvLost(f"{chunk.blocks} KV blocks weigh {chunk.data_bytes} bytes")
            runner.write_blocks(np.array(blocks[received:end], dtype=np.int32), chunk.data)
            await runner.transfer(chunk.data_bytes)
            received, data_bytes = end, data_bytes + chunk.data_bytes
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()  # a generator left early would keep its connection until it is collected
    if received != handle.blocks or received * capabilities.block_size_tokens < handle.tokens:
        raise KvLost(f"{received} KV blocks came for {handle.tokens} tokens in {handle.blocks} blocks")
    return data_bytes
