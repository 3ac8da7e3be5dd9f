"""KV blocks in and out of a pool, in chunks of bounded size."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np

from libs.contracts.errors import KvLost
from libs.engine.port import Capabilities, KvChunk, KvFetcher, KvHandle
from libs.engine.runner import Runner

MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Bound of one chunk on its way; a single larger block still goes as one."""


async def send_blocks(
    runner: Runner, capabilities: Capabilities, held_blocks: Callable[[], list[int]], from_block: int
) -> AsyncIterator[KvChunk]:
    """Chunks of a handle's blocks, in order; `held_blocks` is asked before each and raises when the lease is over."""
    per_chunk = max(MAX_CHUNK_BYTES // capabilities.kv_block_bytes, 1)
    first = from_block
    while part := held_blocks()[first : first + per_chunk]:
        data = runner.read_blocks(np.array(part, dtype=np.int32))
        yield KvChunk(first, len(part), data, len(part) * capabilities.kv_block_bytes)
        first += len(part)


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
