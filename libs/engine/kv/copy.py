"""Copying and checking KV blocks on threads, so that the event loop goes on and more than one core can copy."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import xxhash

from libs.engine.kv_port import KvChunk
from libs.engine.runner import Runner
from libs.runtime.slices import USUAL_SLICE_NS, ask_slice

COPY_THREADS = 2
"""Threads of one engine. Two cores copy nearly twice as fast as one."""
SLICE_BYTES = 8 * 1024 * 1024
"""Bytes that a thread copies or sums at a time: `stop` waits no longer than that takes, 2 ms. Handing smaller ones to
threads would be a fifth of their cost."""
INLINE_BYTES = 256 * 1024
"""No more than this is copied at once, on the caller's thread: another would not wake sooner."""


def block_checksum(data: memoryview) -> int:
    """XXH3 of 64 bits over a block's bytes, which a core computes faster than it copies; other threads run meanwhile.

    It finds damage, and blocks overwritten while they were copied. It is no defence against a peer that means harm:
    workers trust one another.
    """
    checksum = xxhash.xxh3_64()
    checksum.update(data)  # the one-shot function keeps the interpreter's lock
    return checksum.intdigest()


class BlockCopies:
    """The threads of one engine."""

    def __init__(self, runner: Runner, block_bytes: int) -> None:
        self._runner = runner
        self.slice_blocks = max(SLICE_BYTES // block_bytes, 1)
        """Blocks copied, or summed, at a time."""
        self._threads = ThreadPoolExecutor(
            COPY_THREADS, thread_name_prefix="kv-copy", initializer=ask_slice, initargs=(USUAL_SLICE_NS,)
        )

    def writer(self) -> "BlockWriter":
        """For one fetch."""
        return BlockWriter(self._runner, self._threads, self.slice_blocks)

    async def checksums(self, blocks: list[int]) -> list[int]:
        """Checksums of blocks of a pool in this host's memory, while nobody writes to them."""
        data = self._runner.read_blocks(np.array(blocks, dtype=np.int32))
        return await asyncio.get_running_loop().run_in_executor(self._threads, _checksums, data)

    def close(self) -> None:
        """End the threads, once what they are at is done. Idempotent."""
        self._threads.shutdown(cancel_futures=True)


class BlockWriter:
    """Writes one fetch's blocks into the pool, a chunk at a time."""

    def __init__(self, runner: Runner, threads: ThreadPoolExecutor, slice_blocks: int) -> None:
        self._runner = runner
        self._threads = threads
        self._slice_blocks = slice_blocks
        self._under_way: list[Future[None]] = []

    async def write(self, blocks: list[int], chunk: KvChunk) -> None:
        """A chunk into `blocks`. Raises what the runner's `write_blocks` raises; nothing is written any more then."""
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
        """When this returns nothing is written any more, so that the blocks can be freed. Holds its caller for as long
        as one slice takes at most. Idempotent."""
        wait([write for write in self._under_way if not write.cancel()])
        self._under_way = []


def _checksums(data: tuple[memoryview, ...]) -> list[int]:
    return [block_checksum(view) for view in data]
