"""Tests of blocks copied by threads: once a writer is stopped its blocks can be freed at once."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.contracts.errors import KvLost
from libs.engine.kv_port import KvChunk
from libs.engine.kv_transfer import COPY_THREADS, INLINE_BYTES, SLICE_BYTES, BlockCopies, block_checksum
from libs.testing.wait import until

BLOCK_BYTES = SLICE_BYTES
BLOCKS = 6


class SlowPool:
    """A runner whose writes wait for the test."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[int] = []
        self.written: list[int] = []
        self.threads: set[str] = set()
        self.bad: set[int] = set()

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        assert len(blocks) == len(data) == len(checksums)
        self.threads.add(threading.current_thread().name)
        self.begun += blocks.tolist()
        if self.bad & set(blocks.tolist()):
            raise KvLost("damaged")
        assert self.go.wait(10)
        self.written += blocks.tolist()

    def read_blocks(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        return tuple(memoryview(bytes([block]) * 8) for block in blocks.tolist())


@pytest.fixture
def pool() -> SlowPool:
    return SlowPool()


@pytest.fixture
def copies(pool: SlowPool) -> Iterator[BlockCopies]:
    copies = BlockCopies(cast(Any, pool), BLOCK_BYTES)
    yield copies
    pool.go.set()
    copies.close()


def chunk(block_bytes: int = BLOCK_BYTES) -> KvChunk:
    return KvChunk(0, BLOCKS, (memoryview(bytes(block_bytes)),) * BLOCKS, BLOCKS * block_bytes, (0,) * BLOCKS)


async def test_nothing_is_written_after_a_stop(pool: SlowPool, copies: BlockCopies) -> None:
    writer = copies.writer()
    writing = asyncio.create_task(writer.write([*range(BLOCKS)], chunk()))
    await until(lambda: len(pool.begun) == COPY_THREADS)
    threading.Timer(0.05, pool.go.set).start()
    writer.stop()
    written = len(pool.written)
    writing.cancel()
    assert (await asyncio.gather(writing, return_exceptions=True))[0] is not None
    assert len(pool.written) == len(pool.begun) == written == COPY_THREADS


async def test_damage_ends_the_write_with_no_copy_in_progress(pool: SlowPool, copies: BlockCopies) -> None:
    pool.bad = {0}
    threading.Timer(0.05, pool.go.set).start()
    with pytest.raises(KvLost):
        await copies.writer().write([*range(BLOCKS)], chunk())
    assert set(pool.written) == set(pool.begun) - pool.bad


async def test_small_writes_are_immediate_and_large_ones_run_in_threads(pool: SlowPool, copies: BlockCopies) -> None:
    pool.go.set()
    await copies.writer().write([*range(BLOCKS)], chunk(INLINE_BYTES // BLOCKS))
    assert pool.threads == {threading.current_thread().name}
    await copies.writer().write([*range(BLOCKS)], chunk())
    assert sorted(pool.written) == sorted([*range(BLOCKS)] * 2)
    assert len(pool.threads) > 1


async def test_checksums_are_those_of_the_blocks(pool: SlowPool, copies: BlockCopies) -> None:
    found = await copies.checksums([3, 5])
    assert found == [*map(block_checksum, pool.read_blocks(np.array([3, 5], np.int32)))]
