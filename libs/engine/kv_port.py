"""The part of the engine port that KV blocks go through: how they are named, read by a receiver, and fetched."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Where a sequence's blocks are. `opaque` means something to engines only; they may move the bytes themselves."""

    worker_id: str
    incarnation: int
    address: str
    opaque: bytes
    tokens: int
    blocks: int
    kv_layout: str = ""
    streamed: bool = False
    """Its prompt is still being computed: `tokens` and `blocks` are what will be there, and what is sampled there comes
    by `Engine.proceed`."""


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Some consecutive blocks on their way."""

    first_block: int
    blocks: int
    data: tuple[memoryview, ...] = ()
    """The bytes of each block [layers, block_size, 2, kv_heads, head_dim] in the engine's dtype; none from the sim
    engine. They may be views of memory that changes: good until the next chunk is asked for, and only if the checksums
    agree."""
    data_bytes: int = 0
    """What the blocks weigh, also where `data` is only simulated."""
    checksums: tuple[int, ...] = ()
    """The checksum of each block, as `block_checksum` in libs/engine/kv/copy.py computes it."""
    pool_blocks: tuple[int, ...] = ()
    """Where the blocks lie in the sender's pool."""
    ready_blocks: int = 0
    """Blocks of the handle up to here are ready at the sender; 0: unknown. A chunk without blocks tells just that."""
    shared: bool = False
    """The views are of the sender's own memory, on this host."""


class KvExport(Protocol):
    """What one receiver reads of a handle. Until `close` it counts as one of the handle's readers."""

    @property
    def done(self) -> bool:
        """Whether `take` has given the last blocks."""
        ...

    def take(self) -> KvChunk | None:
        """The next blocks, the handle's lease renewed; None while none is ready.

        Raises KvLost once the handle is gone: its lease has ended, or its prompt was given up.
        """
        ...

    @property
    def ready_blocks(self) -> int:
        """Blocks of the handle up to here are ready; 0 where `take` has given all of them. Raises as `take` does."""
        ...

    def close(self) -> None:
        """The receiver has left, whether it has the blocks or not. Idempotent."""
        ...


class KvFetcher(Protocol):
    """How an engine that does not move bytes itself gets the blocks of a handle; the worker provides it."""

    def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncIterator[KvChunk]:
        """Chunks in order, from a block on; the checksums are the caller's to check. The end acknowledges.

        Left early, the sender keeps the blocks for a moment, for another receiver. Raises KvLost when the source is
        gone, KvMismatch when layouts differ.
        """
        ...
