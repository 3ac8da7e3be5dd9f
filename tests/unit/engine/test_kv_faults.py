"""Tests of faults in the stream of a hand-over's blocks: each raises KvLost, and none passes as a whole prompt."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.contracts.errors import KvLost
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.kv_transfer import BlockCopies, block_checksum, receive_blocks

BLOCK_BYTES, BLOCK_TOKENS, CHUNKS = 64, 16, 4
HANDLE = KvHandle("prefill", 1, "127.0.0.1:1", b"", tokens=BLOCK_TOKENS * CHUNKS, blocks=CHUNKS, kv_layout="here")


class SummedPool:
    """A runner that checks every block as the torch engine does."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        if len(data) != len(blocks) or len(checksums) != len(blocks):
            raise KvLost("not as many blocks as were announced")
        for block, view, checksum in zip(blocks.tolist(), data, checksums, strict=True):
            if block_checksum(view) != checksum:
                raise KvLost("damaged")
            self.held[block] = bytes(view)

    async def transfer(self, data_bytes: int) -> None:
        """Take no time."""


def block(index: int) -> memoryview:
    return memoryview(bytes([index]) * BLOCK_BYTES)


def chunk(index: int) -> KvChunk:
    return KvChunk(index, 1, (block(index),), BLOCK_BYTES, (block_checksum(block(index)),))


SENT = [chunk(index) for index in range(CHUNKS)]


async def received(chunks: Sequence[KvChunk | Exception]) -> dict[int, bytes]:
    """Return the blocks of the pool after a pull that gets these chunks."""

    class Fetcher:
        async def fetch(self, _handle: KvHandle, _layout: str, _from_block: int) -> AsyncIterator[KvChunk]:
            for each in chunks:
                if isinstance(each, Exception):
                    raise each
                yield each

    pool = SummedPool()
    copies = BlockCopies(cast(Any, pool), BLOCK_BYTES)
    can = SimpleNamespace(kv_layout="here", kv_block_bytes=BLOCK_BYTES, block_size_tokens=BLOCK_TOKENS)
    try:
        await receive_blocks(
            cast(Any, pool),
            copies.writer(),
            cast(Any, can),
            cast(Any, Fetcher()),
            HANDLE,
            blocks=[*range(CHUNKS)],
            found=0,
        )
    finally:
        copies.close()
    return pool.held


def changed(at: int, change: Callable[[KvChunk], KvChunk]) -> list[KvChunk | Exception]:
    return [change(each) if each.first_block == at else each for each in SENT]


FAULTS: dict[str, list[KvChunk | Exception]] = {
    "nothing comes": [],
    "the last block is lost": [*SENT[:-1]],
    "the first block is lost": [*SENT[1:]],
    "a block between is lost": [*SENT[:1], *SENT[2:]],
    "a block comes twice": [*SENT[:2], *SENT[1:]],
    "the last block comes twice": [*SENT, SENT[-1]],
    "two blocks change places": [SENT[0], SENT[2], SENT[1], SENT[3]],
    "a block is short": changed(1, lambda each: replace(each, data=(each.data[0][:-1],))),
    "a block says that it is short": changed(1, lambda each: replace(each, data_bytes=BLOCK_BYTES - 1)),
    "a block is another one": changed(2, lambda each: replace(each, data=(block(9),))),
    "one bit differs": changed(3, lambda each: replace(each, checksums=(each.checksums[0] ^ 1,))),
    "checksums are left out": changed(0, lambda each: replace(each, checksums=())),
    "the sender dies after the handle": [KvLost("the sender does not answer")],
    "the sender dies between blocks": [*SENT[:2], KvLost("the stream to it was closed")],
}


async def test_a_whole_stream_gives_the_senders_blocks() -> None:
    assert await received(SENT) == {index: bytes(block(index)) for index in range(CHUNKS)}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_stream_is_lost_kv(fault: str) -> None:
    with pytest.raises(KvLost):
        await received(FAULTS[fault])


@pytest.mark.parametrize("at", range(CHUNKS * BLOCK_BYTES))
async def test_no_changed_byte_passes_as_the_senders(at: int) -> None:
    index, offset = divmod(at, BLOCK_BYTES)
    damaged = bytearray(block(index))
    damaged[offset] ^= 1 << (at % 8)
    with pytest.raises(KvLost):
        await received(changed(index, lambda each: replace(each, data=(memoryview(damaged),))))
