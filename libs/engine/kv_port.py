"""Ports for KV blocks: their names, their export to a receiver, and their fetching."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KvHandle:
    """The location of a sequence's blocks. Only engines interpret `opaque`, and they may move the bytes themselves."""

    worker_id: str
    incarnation: int
    address: str
    opaque: bytes
    tokens: int
    blocks: int
    kv_layout: str = ""
    streamed: bool = False
    """True if the prompt is still being computed. `tokens` and `blocks` are then the final counts, and sampled tokens
    arrive through `Engine.proceed`.
    """
    named: bool = False
    """True if a gateway chose `opaque` before the prompt began. Such a handle is also `streamed`, the sender may not
    know the handle yet, and sampled tokens arrive with the last chunk.
    """


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Consecutive blocks of a handle in transit."""

    first_block: int
    blocks: int
    data: tuple[memoryview, ...] = ()
    """The bytes of each block [layers, block_size, 2, kv_heads, head_dim] in the engine's dtype; empty from the sim
    engine.

    They may be views of memory that changes. They are valid until the next chunk is requested, and only if the
    checksums agree.
    """
    data_bytes: int = 0
    """Total size of the blocks, even if `data` is only simulated."""
    checksums: tuple[int, ...] = ()
    """The checksum of each block as computed by `block_checksum` in libs/engine/kv_transfer.py."""
    pool_blocks: tuple[int, ...] = ()
    """The ids of the blocks in the sender's pool."""
    ready_blocks: int = 0
    """The leading blocks of the handle that are ready at the sender; 0 if unknown. A chunk may contain only this
    number.
    """
    shared: bool = False
    """True if the views are of the sender's own memory on this host."""
    token_ids: tuple[int, ...] = ()
    """With the last chunk of a named handle, the tokens sampled where its prompt was computed."""
    waited_ns: int = 0
    """The time for which the sender of a named handle has had nothing to send, from the pull's opening on."""


class KvExport(Protocol):
    """The export of a handle's blocks to one receiver, which counts as a reader of the handle until `close`."""

    @property
    def done(self) -> bool:
        """True if `take` has returned the last blocks."""
        ...

    def take(self) -> KvChunk | None:
        """Return the next blocks and renew the handle's lease; None while none is ready.

        Raise KvLost if the handle is gone because its lease has ended or its prompt was abandoned.
        """
        ...

    @property
    def ready_blocks(self) -> int:
        """The number of leading blocks that are ready; 0 if `take` has returned all of them. Raises the same errors as
        `take`.
        """
        ...

    def close(self) -> None:
        """Record that the receiver has left, with or without the blocks. Idempotent."""
        ...


class KvFetcher(Protocol):
    """A source of a handle's blocks for engines that do not move bytes themselves. The worker provides it."""

    def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncIterator[KvChunk]:
        """Iterate over chunks in order from a block on. The caller checks the checksums; reaching the end
        acknowledges.

        If the iteration ends early, the sender keeps the blocks briefly for another receiver. Raise KvLost if the
        source is gone, KvMismatch if layouts differ.
        """
        ...
