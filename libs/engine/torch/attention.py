"""Paged attention behind transformers' AttentionInterface: any model that attends through it runs on the pool.

All tokens of a step form one row [1, tokens]; where each belongs is in a `StepPlan`, which travels to every layer as a
keyword of the model's forward. A layer first writes the new keys and values to their slots, then attends: sequences
with one new token together, padded to a common number of blocks; prompt chunks one by one.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from libs.contracts.errors import StartupError
from libs.engine.runner import Chunk
from libs.engine.torch.kv_pool import KvPool

ATTENTION_NAME = "fulcrum_paged"
MAX_PADDING = 2
"""A sequence is padded to at most this many times its own blocks; longer ones form a group of their own."""


UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What models ask of attention beyond a causal softmax. They ask in every step, so the warm-up step finds out."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Several new tokens of one sequence."""

    first: int
    """Index of its first token in the row."""
    tokens: int
    context: int
    """Positions it may see: those before, and its own."""
    blocks: torch.Tensor
    """[blocks] int64: pool blocks of the positions [0, context)."""
    mask: torch.Tensor | None
    """[tokens, context] bool, True where position may be seen; None: plain causal, nothing came before."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each."""

    rows: torch.Tensor
    """[sequences] int64: their tokens' indices in the row."""
    blocks: torch.Tensor
    """[sequences x blocks] int64: pool blocks, padded with block 0."""
    mask: torch.Tensor
    """[sequences, 1, 1, positions] bool, False for padding."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where the tokens of one step belong; the same for all layers."""

    positions: torch.Tensor
    """[tokens] int64: each token's position in its sequence."""
    pool: torch.Tensor
    """[blocks, layers, 2, block_size, kv_heads, head_dim]"""
    slot_blocks: torch.Tensor
    """[tokens] int64: the block that takes each token's KV."""
    slot_offsets: torch.Tensor
    """[tokens] int64: the place in that block."""
    prompts: tuple[PromptChunk, ...]
    decodes: tuple[DecodeGroup, ...]


def plan_step(chunks: tuple[Chunk, ...], pool: KvPool) -> StepPlan:
    """Index tensors on the pool's device for the chunks in order, one after the other in the row."""
    size = pool.shape.block_size
    device = pool.tensor.device
    firsts = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])
    positions = [np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
    slots = [chunk.block_table[own // size] for chunk, own in zip(chunks, positions, strict=True)]
    prompts = [
        _plan_prompt(chunk, int(first), size, device)
        for chunk, first in zip(chunks, firsts, strict=False)
        if len(chunk.token_ids) > 1
    ]
    singles = [(chunk, int(first)) for chunk, first in zip(chunks, firsts, strict=False) if len(chunk.token_ids) == 1]
    where = np.concatenate(positions)
    return StepPlan(
        positions=_to_device(where, device),
        pool=pool.tensor,
        slot_blocks=_to_device(np.concatenate(slots), device),
        slot_offsets=_to_device(where % size, device),
        prompts=tuple(prompts),
        decodes=tuple(_plan_decodes(singles, size, device)),
    )


def _plan_prompt(chunk: Chunk, first: int, size: int, device: torch.device) -> PromptChunk:
    tokens = len(chunk.token_ids)
    context = chunk.start + tokens
    blocks = _to_device(chunk.block_table[: -(-context // size)], device)
    mask = None
    if chunk.start:
        mask = torch.ones(tokens, context, dtype=torch.bool, device=device).tril_(chunk.start)
    return PromptChunk(first, tokens, context, blocks, mask)


def _plan_decodes(singles: list[tuple[Chunk, int]], size: int, device: torch.device) -> list[DecodeGroup]:
    """Groups of similar length, longest first, so that padding stays bounded."""
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
        visible = np.arange(needed[begin] * size)[None, :] < lengths[:, None]
        rows = np.array([first for _, first in members])
        mask = torch.from_numpy(visible).to(device)[:, None, None, :]
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
    """One layer's attention of a step; raises StartupError for a kind of attention that it does not compute.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]; returns
    [1, tokens, heads, head_dim].
    """
    for name in UNSUPPORTED_OPTIONS:
        if options.get(name) is not None:
            raise StartupError(f"the torch engine has no attention with {name}: choose another model or engine")
    layer = plan.pool[:, module.layer_idx]  # [blocks, 2, block_size, kv_heads, head_dim]
    slots = (plan.slot_blocks, plan.slot_offsets)
    layer[:, 0].index_put_(slots, key[0].transpose(0, 1))
    layer[:, 1].index_put_(slots, value[0].transpose(0, 1))
    output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])  # [tokens, heads, head_dim]
    for prompt in plan.prompts:
        rows = slice(prompt.first, prompt.first + prompt.tokens)
        output[rows] = _attend_prompt(prompt, query[0, :, rows], layer, scaling)
    for group in plan.decodes:
        output[group.rows] = _attend_decodes(group, query[0, :, group.rows], layer, scaling)
    return output[None], None


def _attend_prompt(
    prompt: PromptChunk, query: torch.Tensor, layer: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """query [heads, tokens, head_dim]; returns [tokens, heads, head_dim]."""
    kv_heads = layer.shape[3]
    heads, tokens, head_dim = query.shape
    grouped = query.reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    # Query heads that share a KV head are one batch over an expanded view: keys and values are not repeated in memory.
    shape = (kv_heads, heads // kv_heads, prompt.context, head_dim)
    keys = layer[:, 0].index_select(0, prompt.blocks).flatten(0, 1)[: prompt.context]  # [context, kv_heads, head_dim]
    values = layer[:, 1].index_select(0, prompt.blocks).flatten(0, 1)[: prompt.context]
    attended = functional.scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1)[:, None].expand(shape),
        values.transpose(0, 1)[:, None].expand(shape),
        attn_mask=prompt.mask,
        is_causal=prompt.mask is None,
        scale=scaling,
    )
    return attended.reshape(heads, tokens, head_dim).transpose(0, 1)


def _attend_decodes(
    group: DecodeGroup, query: torch.Tensor, layer: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """query [heads, sequences, head_dim]; returns [sequences, heads, head_dim]."""
    kv_heads = layer.shape[3]
    heads, sequences, head_dim = query.shape
    # Query heads that share a KV head stand in for the query's positions: one token sees all of its context anyway.
    grouped = query.transpose(0, 1).reshape(sequences, kv_heads, heads // kv_heads, head_dim)
    shape = (sequences, -1, kv_heads, head_dim)
    keys = layer[:, 0].index_select(0, group.blocks).view(shape).transpose(1, 2)  # [sequences, kv_heads, positions, ..]
    values = layer[:, 1].index_select(0, group.blocks).view(shape).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scaling)
    return attended.reshape(sequences, heads, head_dim)
