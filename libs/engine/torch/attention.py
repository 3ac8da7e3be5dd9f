"""The KV pool, a tensor in which each block is contiguous, and paged attention on it.

Any model that attends through transformers' AttentionInterface runs on the pool. All tokens of a step form one row [1,
tokens]. A `StepPlan` gives their positions and slots, and is passed to every layer as a keyword of the model's forward.
A layer first writes the new keys and values to their slots, then attends. Sequences with one new token attend together,
padded to a common number of blocks. Prompt chunks attend one by one. Earlier KV is gathered from the pool into memory
that all layers and steps share. Fresh memory of that size would cost more in page faults than the copy itself.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch.nn import functional

from libs.contracts.errors import KvLost, KvMismatch, StartupError
from libs.engine.kv_shared_pool import HEADER_BYTES, PoolFile, PoolFileError
from libs.engine.kv_transfer import block_checksum
from libs.engine.runner import Chunk

log = structlog.get_logger()

# The largest fraction of the free memory that the pool may take.
MEMORY_HEADROOM = 0.9


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one block. Keys are stored after their rotary embedding, as attention reads them."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """The bytes of a block [layers, block_size, 2, kv_heads, head_dim]."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    @property
    def layout(self) -> str:
        """The name of the layout, equal for pools that can exchange blocks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kv2/{dtype}/{self.layers}x{self.block_size}x2x{self.kv_heads}x{self.head_dim}"


class KvPool:
    """A pool of blocks [blocks, layers, block_size, 2, kv_heads, head_dim] on one device, initially zero.

    The keys and values of a position are adjacent. One copy gathers both, and positions of gathered blocks are evenly
    spaced, as attention kernels require.

    Attention reads whole blocks and masks positions that the sequence has not written. Those must be finite, since a
    weight of zero times NaN is NaN. They contain initial zeros or the KV of earlier sequences, which are finite.
    """

    def __init__(self, shape: BlockShape, memory_mb: int, device: torch.device, file: Path | None = None) -> None:
        """Allocate the pool.

        On a CPU, a pool with `file` is memory that other processes can map. If the folder has no room, the pool is
        private. Raise StartupError if `memory_mb` is too small for two blocks, or more than the device has free.
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
        # On a separate stream, copies do not queue behind the running step.
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
        """Return the bytes of each block: on a CPU views of the pool, otherwise a copy."""
        if self._host is not None:
            return tuple(self._host[block].data for block in blocks)
        with self._copying():
            return tuple(row.data for row in self._bytes[self._index(blocks)].cpu().numpy())

    def write(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """Write bytes that `read` returned elsewhere into `blocks`, and compare the written bytes with the checksums.

        Raise KvLost for a damaged block after zeroing it, since NaN or infinity would spoil the answer of the block's
        next sequence. Raise KvMismatch for a wrong number of bytes.
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
        """Make later reads and writes wait for the step just queued on the device.

        Call it on the stream that computes.
        """
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
    """Return zeros [*size]. With `file`, they are the file's memory."""
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


ATTENTION_NAME = "fulcrum_paged"
# A sequence is padded to at most this multiple of its own blocks. Longer sequences form a separate group.
MAX_PADDING = 2


# The options by which models request attention beyond a causal softmax. Every step includes them, so the warm-up step
# detects them.
UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk of several new tokens of one sequence."""

    first: int
    """The index of the chunk's first token in the row."""
    tokens: int
    context: int
    """The number of visible positions: the earlier ones and those of the chunk."""
    blocks: torch.Tensor
    """[blocks] int64: pool blocks of the positions [0, context)."""
    mask: torch.Tensor | None
    """[tokens, context] added to scores, -inf for hidden positions; None if the chunk starts its sequence."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """A group of sequences with one new token each, which attend together."""

    rows: torch.Tensor
    """[sequences] int64: the indices of their tokens in the row."""
    blocks: torch.Tensor
    """[sequences x blocks] int64: pool blocks, padded with block 0."""
    mask: torch.Tensor
    """[sequences, 1, 1, positions] added to scores, -inf for padding."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The positions, slots and groups of the tokens of one step, which are the same in all layers."""

    positions: torch.Tensor
    """[tokens] int64: each token's position in its sequence."""
    pool: torch.Tensor
    """The pool's tensor [blocks, layers, block_size, 2, kv_heads, head_dim]."""
    gathered: torch.Tensor
    """[blocks, block_size, 2, kv_heads, head_dim]: memory for the blocks of any one chunk or group, in one layer."""
    slot_blocks: torch.Tensor
    """[tokens] int64: the block to which each token's KV is written."""
    slot_offsets: torch.Tensor
    """[tokens] int64: the token's offset in that block."""
    prompts: tuple[PromptChunk, ...]
    decodes: tuple[DecodeGroup, ...]


class GatherMemory:
    """Memory for the KV that one layer attends to. It is reused between steps, and grows to the largest need so far."""

    def __init__(self, pool: KvPool) -> None:
        self._like = pool.tensor
        self._memory = pool.tensor.new_empty(0, *pool.tensor.shape[2:])

    def take(self, blocks: int) -> torch.Tensor:
        """Return memory for at least `blocks` blocks."""
        if len(self._memory) < blocks:
            self._memory = self._like.new_empty(1 << (blocks - 1).bit_length(), *self._like.shape[2:])
        return self._memory


def plan_step(chunks: tuple[Chunk, ...], pool: KvPool, memory: GatherMemory) -> StepPlan:
    """Build index tensors on the pool's device for chunks that form the step's row in order."""
    size = pool.shape.block_size
    device = pool.tensor.device
    dtype = pool.shape.dtype
    firsts = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])
    positions = [np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
    slots = [chunk.block_table[own // size] for chunk, own in zip(chunks, positions, strict=True)]
    prompts = [
        _plan_prompt(chunk, int(first), size, device, dtype)
        for chunk, first in zip(chunks, firsts, strict=False)
        if len(chunk.token_ids) > 1
    ]
    singles = [(chunk, int(first)) for chunk, first in zip(chunks, firsts, strict=False) if len(chunk.token_ids) == 1]
    decodes = _plan_decodes(singles, size, device, dtype)
    where = np.concatenate(positions)
    return StepPlan(
        positions=_to_device(where, device),
        pool=pool.tensor,
        gathered=memory.take(max([len(part.blocks) for part in prompts] + [len(group.blocks) for group in decodes])),
        slot_blocks=_to_device(np.concatenate(slots), device),
        slot_offsets=_to_device(where % size, device),
        prompts=tuple(prompts),
        decodes=tuple(decodes),
    )


def _plan_prompt(chunk: Chunk, first: int, size: int, device: torch.device, dtype: torch.dtype) -> PromptChunk:
    tokens = len(chunk.token_ids)
    context = chunk.start + tokens
    blocks = _to_device(chunk.block_table[: -(-context // size)], device)
    mask = None
    if chunk.start:
        mask = torch.full((tokens, context), -torch.inf, dtype=dtype, device=device).triu_(chunk.start + 1)
    return PromptChunk(first, tokens, context, blocks, mask)


def _plan_decodes(
    singles: list[tuple[Chunk, int]], size: int, device: torch.device, dtype: torch.dtype
) -> list[DecodeGroup]:
    """Group sequences by length, longest first, so that each is padded by at most `MAX_PADDING` times."""
    ordered = sorted(singles, key=lambda single: -single[0].start)
    needed = [chunk.start // size + 1 for chunk, _ in ordered]
    cuts = [0]
    for index, blocks in enumerate(needed):
        if needed[cuts[-1]] > MAX_PADDING * blocks:
            cuts.append(index)
    groups = []
    for begin, end in pairwise([*cuts, len(ordered)] if ordered else []):
        members = ordered[begin:end]
        table = np.zeros((len(members), needed[begin]), np.int64)
        for row, (chunk, _) in enumerate(members):
            table[row, : needed[begin + row]] = chunk.block_table[: needed[begin + row]]
        lengths = np.array([chunk.start + 1 for chunk, _ in members])
        hidden = np.where(
            np.arange(needed[begin] * size)[None, :] < lengths[:, None], np.float32(0), -np.float32("inf")
        )
        rows = np.array([first for _, first in members])
        mask = torch.from_numpy(hidden).to(device, dtype)[:, None, None, :]
        groups.append(DecodeGroup(_to_device(rows, device), _to_device(table.reshape(-1), device), mask))
    return groups


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    plan: StepPlan,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention of a step. Raise StartupError for an unsupported kind of attention.

    `query` is [1, heads, tokens, head_dim]; `key` and `value` are [1, kv_heads, tokens, head_dim]. Returns [1, tokens,
    heads, head_dim].
    """
    for name in UNSUPPORTED_OPTIONS:
        if options.get(name) is not None:
            raise StartupError(f"the torch engine has no attention with {name}: choose another model or engine")
    layer = plan.pool[:, module.layer_idx]  # [blocks, block_size, 2, kv_heads, head_dim]
    new = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)  # [tokens, 2, kv_heads, head_dim]
    layer.index_put_((plan.slot_blocks, plan.slot_offsets), new)
    output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])  # [tokens, heads, head_dim]
    for prompt in plan.prompts:
        rows = slice(prompt.first, prompt.first + prompt.tokens)
        if prompt.mask is None:
            keys, values = key[0, :, rows], value[0, :, rows]
        else:
            keys, values = _gather(layer, prompt.blocks, plan.gathered).flatten(0, 1)[: prompt.context].unbind(1)
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        output[rows] = _attend_prompt(query[0, :, rows], keys, values, prompt.mask, scaling)
    for group in plan.decodes:
        kv = _gather(layer, group.blocks, plan.gathered).view(len(group.rows), -1, *layer.shape[2:])
        output[group.rows] = _attend_decodes(query[0, :, group.rows], kv, group.mask, scaling)
    return output[None], None


def _gather(layer: torch.Tensor, blocks: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Return [blocks, block_size, 2, kv_heads, head_dim], valid until the next call."""
    return torch.index_select(layer, 0, blocks, out=into[: len(blocks)])


def _attend_prompt(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attend to one chunk: query [heads, tokens, head_dim], keys and values [kv_heads, context, head_dim].

    Returns [tokens, heads, head_dim].
    """
    heads, tokens, head_dim = query.shape
    kv_heads, context, _ = keys.shape
    grouped = query.reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    # Query heads that share a KV head form one batch over an expanded view, so keys and values are not copied.
    shape = (kv_heads, heads // kv_heads, context, head_dim)
    attended = functional.scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return attended.reshape(heads, tokens, head_dim).transpose(0, 1)


def _attend_decodes(query: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attend to one group: query [heads, sequences, head_dim], kv [sequences, positions, 2, kv_heads, head_dim].

    Returns [sequences, heads, head_dim].
    """
    heads, sequences, head_dim = query.shape
    # Query heads that share a KV head take the dimension of query positions, because the one new token sees all of its
    # context.
    grouped = query.transpose(0, 1).reshape(sequences, kv.shape[3], -1, head_dim)
    keys, values = kv.transpose(1, 3).unbind(2)  # [sequences, kv_heads, positions, head_dim]
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(sequences, heads, head_dim)
