"""Ports for the KV of a sequence: its handle, its export to a receiver, and its fetching."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KvHandle:
    """The location of a sequence's blocks. Only engines interpret `opaque`. An engine may move the bytes itself."""

    worker_id: str
    incarnation: int
    address: str
    opaque: bytes
    tokens: int
    blocks: int
    kv_layout: str = ""
    streamed: bool = False
    """True if the prompt is still being computed. `tokens` and `blocks` are then the final counts. `Engine.proceed`
    supplies the sampled tokens.
    """
    named: bool = False
    """True if a gateway chose `opaque` before the prompt began, so the sender may not know the handle yet. Such a
    handle is also `streamed`. The last chunk contains the sampled tokens.
    """


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Consecutive blocks of a handle in transit."""

    first_block: int
    blocks: int
    data: tuple[memoryview, ...] = ()
    """The bytes of each block [layers, block_size, 2, kv_heads, head_dim] in the engine's dtype; empty from the sim
    engine.

    Each view may show memory that changes. It is valid until the next chunk is requested, and only if the checksum
    agrees.
    """
    data_bytes: int = 0
    """The total size of the blocks, even if the sim engine sends no `data`."""
    checksums: tuple[int, ...] = ()
    """The checksum of each block as computed by `block_checksum` in libs/engine/kv_transfer.py."""
    pool_blocks: tuple[int, ...] = ()
    """The ids of the blocks in the sender's pool."""
    ready_blocks: int = 0
    """The number of leading blocks of the handle that are ready at the sender; 0 if unknown. A chunk with this number
    may have no blocks.
    """
    shared: bool = False
    """True if the views show the sender's own memory on this host."""
    token_ids: tuple[int, ...] = ()
    """The tokens sampled by the sender of a named handle, in its last chunk only."""
    waited_ns: int = 0
    """The total time since the pull began for which the sender of a named handle had nothing to send; 0 if unknown."""


class KvExport(Protocol):
    """An export of a handle's blocks to one receiver, which counts as a reader of the handle until `close`."""

    @property
    def done(self) -> bool:
        """True once `take` has returned the last blocks."""
        ...

    def take(self) -> KvChunk | None:
        """Return the next blocks and renew the handle's lease; None while no block is ready.

        Raise KvLost if the handle's lease has ended or its prompt was abandoned.
        """
        ...

    @property
    def ready_blocks(self) -> int:
        """The number of leading blocks that are ready; 0 if `take` has returned all of them.

        Raises KvLost like `take`.
        """
        ...

    def close(self) -> None:
        """Record that the receiver has left, with the blocks or without. Idempotent."""
        ...


class KvFetcher(Protocol):
    """A source of a handle's blocks for engines that do not move the bytes themselves. The worker implements it."""

    def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncIterator[KvChunk]:
        """Iterate over the chunks of a handle in order, starting with the block `from_block`.

        The caller checks the checksums. The end of the iteration acknowledges the blocks. If the caller stops earlier,
        the sender holds the blocks for a short time, so that another receiver can fetch them. Raise KvLost if the
        source is gone, KvMismatch if layouts differ.
        """
        ...
