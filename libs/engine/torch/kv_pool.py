"""The torch engine's KV pool: one tensor in which each block is contiguous, so that handing a block over is one
copy.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from libs.contracts.errors import KvLost, KvMismatch, StartupError
from libs.engine.kv.copy import block_checksum
from libs.engine.kv.pool_file import HEADER_BYTES, PoolFile, PoolFileError

log = structlog.get_logger()

# Fraction of the free memory that the pool may take at most.
MEMORY_HEADROOM = 0.9


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one block. Keys are stored rotated, as attention reads them."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block [layers, block_size, 2, kv_heads, head_dim]."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    @property
    def layout(self) -> str:
        """A name that is equal for pools that can exchange blocks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kv2/{dtype}/{self.layers}x{self.block_size}x2x{self.kv_heads}x{self.head_dim}"


class KvPool:
    """A pool of blocks [blocks, layers, block_size, 2, kv_heads, head_dim] on one device, initially zero.

    Keys and values of a position are adjacent. One copy gathers both, and positions of gathered blocks are evenly
    spaced, as attention kernels require.

    Attention reads whole blocks and masks positions that the sequence has not written. Those must be finite, since
    a weight of zero times NaN is NaN. Initial zeros and KV of earlier sequences are.
    """

    def __init__(self, shape: BlockShape, memory_mb: int, device: torch.device, file: Path | None = None) -> None:
        """Allocate the pool, on a CPU in `file`, if given, which other processes can map. Without room there it is
        private.

        Raise StartupError if `memory_mb` is too small for two blocks, or more than the device has free.
        """
        self.shape = shape
        self.blocks = memory_mb * 2**20 // shape.block_bytes
        if self.blocks < 2:
            raise StartupError(
                f"kv_memory_mb={memory_mb} holds {self.blocks} KV blocks of {shape.block_bytes} bytes: raise it"
            )
        free = _free_bytes(device)
        if free is not None and self.blocks * shape.block_bytes > free * MEMORY_HEADROOM:
            raise StartupError(
                f"kv_memory_mb={memory_mb} does not fit the {free >> 20} MB that {device} has free: lower it"
            )
        self._file = _share(file, self.blocks, shape.block_bytes) if file and device.type == "cpu" else None
        size = (self.blocks, shape.layers, shape.block_size, 2, shape.kv_heads, shape.head_dim)
        try:
            self.tensor = _tensor_in(self._file, size, shape.dtype, device)
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            raise StartupError(f"cannot allocate kv_memory_mb={memory_mb} on {device}: lower it") from error
        # [blocks, block_bytes] uint8, sharing the pool's memory
        self._bytes = self.tensor.view(self.blocks, -1).view(torch.uint8)
        self._host: NDArray[np.uint8] | None = self._bytes.numpy() if device.type == "cpu" else None
        # On a stream of their own, copies do not queue behind the running step.
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nonce(self) -> bytes:
        """The nonce in the pool's file; empty for a private pool."""
        return self._file.header.nonce if self._file else b""

    def close(self) -> None:
        """Remove the pool's file, if it has one. Idempotent."""
        if self._file is not None:
            self._file.close()

    def read(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        """Return the bytes of each block: views of the pool on a CPU, else of a copy."""
        if self._host is not None:
            return tuple(self._host[block].data for block in blocks)
        with self._copying():
            return tuple(row.data for row in self._bytes[self._index(blocks)].cpu().numpy())

    def write(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """Write bytes that `read` returned elsewhere into `blocks`, and compare what was written with the checksums.

        Raise KvLost for a damaged block and zero it, since values that are not finite would spoil the block's next
        user. Raise KvMismatch for a wrong number of bytes.
        """
        if len(data) != len(blocks) or any(view.nbytes != self.shape.block_bytes for view in data):
            raise KvMismatch(f"{len(data)} parts for {len(blocks)} KV blocks of {self.shape.block_bytes} bytes")
        if len(checksums) != len(blocks):
            raise KvLost(f"{len(checksums)} checksums for {len(blocks)} KV blocks")
        host = self._host
        rows = host if host is not None else np.empty((len(blocks), self.shape.block_bytes), np.uint8)
        for at, (block, view, checksum) in enumerate(zip(blocks, data, checksums, strict=True)):
            row = rows[block if host is not None else at]
            np.copyto(row, np.frombuffer(view, np.uint8))
            if block_checksum(row.data) != checksum:  # while the block is in the CPU's cache
                row[:] = 0
                raise KvLost("a KV block is not what was sent: it was damaged or overwritten on its way")
        if host is None:
            self._to_device(blocks, rows)

    def written(self) -> None:
        """Order later reads after the step just given to the device. Call it on the stream that computes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._bytes.device))

    def _to_device(self, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> None:
        with self._copying():
            self._bytes[self._index(blocks)] = torch.from_numpy(rows).to(self._bytes.device)
        if self._stream is not None:
            self._stream.synchronize()

    def _copying(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _index(self, blocks: Sequence[int] | NDArray[np.int32]) -> torch.Tensor:
        return torch.as_tensor(np.asarray(blocks, np.int64), device=self._bytes.device)


def _share(file: Path, blocks: int, block_bytes: int) -> PoolFile | None:
    try:
        return PoolFile(file.parent, file.name, blocks=blocks, block_bytes=block_bytes)
    except PoolFileError as error:
        log.warning("the KV pool is private memory: other workers get its blocks over gRPC", reason=str(error))
        return None


def _tensor_in(file: PoolFile | None, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros [*size], in the file's memory if there is a file."""
    if file is None:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.frombuffer(file.memory, dtype=dtype, offset=HEADER_BYTES).view(size)


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available_kb = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(available_kb) * 1024 if available_kb else None
