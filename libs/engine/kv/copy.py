"""Copying and checksums of KV blocks on threads, which leaves the event loop free and uses more than one core."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import xxhash

from libs.engine.kv_port import KvChunk
from libs.engine.runner import Runner
from libs.runtime.linux import USUAL_SLICE_NS, ask_slice

# Threads per engine. Two cores copy nearly twice as fast as one.
COPY_THREADS = 2
# Bytes that a thread copies or sums at a time. `stop` waits for at most one slice, about 2 ms. With smaller slices
# a fifth of their time would go into the hand-over to threads.
SLICE_BYTES = 8 * 1024 * 1024
# Up to this size a chunk is copied on the caller's thread, since another thread would not wake sooner.
INLINE_BYTES = 256 * 1024


def block_checksum(data: memoryview) -> int:
    """Return the 64-bit XXH3 of a block. A core computes it faster than it copies, and other threads run meanwhile.

    It detects damage, and blocks overwritten while they were copied. It is no defence against a malicious peer,
    since workers trust one another.
    """
    checksum = xxhash.xxh3_64()
    checksum.update(data)  # the one-shot function keeps the interpreter's lock
    return checksum.intdigest()


class BlockCopies:
    """The threads on which one engine copies and sums blocks."""

    def __init__(self, runner: Runner, block_bytes: int) -> None:
        self._runner = runner
        self.slice_blocks = max(SLICE_BYTES // block_bytes, 1)
        """Number of blocks copied or summed at a time."""
        self._threads = ThreadPoolExecutor(
            COPY_THREADS, thread_name_prefix="kv-copy", initializer=ask_slice, initargs=(USUAL_SLICE_NS,)
        )

    def writer(self) -> "BlockWriter":
        """Return a writer for the blocks of one fetch."""
        return BlockWriter(self._runner, self._threads, self.slice_blocks)

    async def checksums(self, blocks: list[int]) -> list[int]:
        """Return the checksums of blocks of a pool in host memory. Nobody may write to them meanwhile."""
        data = self._runner.read_blocks(np.array(blocks, dtype=np.int32))
        return await asyncio.get_running_loop().run_in_executor(self._threads, _checksums, data)

    def close(self) -> None:
        """End the threads once their current slices are done. Idempotent."""
        self._threads.shutdown(cancel_futures=True)


class BlockWriter:
    """A writer of one fetch's blocks into the pool, one chunk at a time."""

    def __init__(self, runner: Runner, threads: ThreadPoolExecutor, slice_blocks: int) -> None:
        self._runner = runner
        self._threads = threads
        self._slice_blocks = slice_blocks
        self._under_way: list[Future[None]] = []

    async def write(self, blocks: list[int], chunk: KvChunk) -> None:
        """Write a chunk into `blocks`. Raise as the runner's `write_blocks` does, after which nothing more is
        written.
        """
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
        """Block until nothing is being written any more, so that the blocks can be freed. Idempotent.

        This takes as long as one slice at most.
        """
        wait([write for write in self._under_way if not write.cancel()])
        self._under_way = []


def _checksums(data: tuple[memoryview, ...]) -> list[int]:
    return [block_checksum(view) for view in data]
