"""The KV of vLLM by groups of layers: bytes, block events, and the engine that computes it. For the EngineCore process.

Block sizes and groups depend on attention backends, which the computing processes choose. Only EngineCore knows them.
The scheduler receives vLLM's KVCacheConfig, and writes the facts that the worker needs into a file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from libs.engine.vllm.starting import KvFacts
from libs.engine.vllm.step_reports import Rehash
from libs.perfmodel.utilisation import KvGroup, KvShape

# The indices of these dimensions in vLLM's stride order.
LAYERS, BLOCKS = 0, 1
# vLLM's kind of layer with one block per sequence of any length. Some builds of 0.32 lack it.
RING = getattr(kv_cache_interface, "CircularBufferSpec", ())


def write_kv_facts(file: Path, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Write the KV shape and layout into `file`. The worker reads it once EngineCore serves."""
    facts = KvFacts(
        kv_shape(vllm_config, kv_cache_config),
        str(vllm_config.cache_config.kv_cache_layout or ""),
        kv_cache_config.has_mamba_layers,
    )
    file.write_bytes(msgspec.json.encode(facts))


def kv_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KvShape:
    """Return the KV shape according to the first rank's configuration. All pipeline stages are assumed to be alike."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    stages = model.get_total_num_hidden_layers() / max(model.get_num_layers(parallel), 1)
    pages = _pages(kv_cache_config)
    groups: dict[tuple[int, int], float] = {}
    state_bytes = 0.0
    for group in kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, layer)
            layer_bytes = _page_bytes(spec, pages.get(layer)) * _copies(vllm_config, spec) * stages
            if isinstance(spec, MambaSpec):
                state_bytes += layer_bytes * (1 + spec.num_speculative_blocks)
            elif isinstance(spec, RING):
                state_bytes += layer_bytes
            else:
                key = (spec.block_size, _window_tokens(spec))
                groups[key] = groups.get(key, 0.0) + layer_bytes
    found = (KvGroup(tokens, round(size), window) for (tokens, window), size in sorted(groups.items()))
    return KvShape(tuple(found), round(state_bytes))


def _layer_spec(spec: Any, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _pages(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return the distance in bytes between two pages of a layer, by layer.

    The scheduler gets one spec for layers whose pages differ in size. Only the strides show the sizes.
    """
    layout = kv_cache_config.kv_cache_layout
    if layout is None or not kv_cache_config.num_blocks:
        return {}
    outermost, second, *_ = KVCacheLayout[layout].stride_order
    if outermost != LAYERS and (outermost, second) != (BLOCKS, LAYERS):
        return {}
    blocks = kv_cache_config.num_blocks if outermost == LAYERS else 1
    return {
        layer: tensor.layer_stride // blocks for tensor in kv_cache_config.kv_cache_tensors for layer in tensor.layers
    }


def _page_bytes(spec: KVCacheSpec, page_bytes: int | None) -> int:
    """Return the bytes of one layer's block on one rank, without the padding to the largest kind of block."""
    if page_bytes is None or page_bytes == spec.page_size_bytes:
        return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
    return page_bytes


def _copies(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """Return the number of ranks that hold different parts of a layer."""
    width = int(vllm_config.parallel_config.tensor_parallel_size)
    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else width
    if isinstance(spec, AttentionSpec) and spec.max_tp_shards is not None:
        return min(width, int(spec.max_tp_shards))
    return min(width, int(vllm_config.model_config.get_total_num_kv_heads()))


def _window_tokens(spec: KVCacheSpec) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if isinstance(spec, ChunkedLocalAttentionSpec) else 0


class Rehasher:
    """A publisher of vLLM's KV events for one group of layers. Each group stores and evicts its own blocks."""

    def __init__(self, rehash: Rehash, group: int) -> None:
        self._rehash = rehash
        self._group = group

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._rehash.cleared()
            elif event.group_idx != self._group:
                continue
            elif isinstance(event, BlockStored):
                keys = event.extra_keys or [None]
                salt = str(keys[0] and keys[0][-1])
                # vLLM represents an image as a pair, and names and salts as strings.
                images = [[key for key in found or () if isinstance(key, tuple)] for found in keys]
                self._rehash.stored(event.block_hashes, event.parent_block_hash, salt, event.token_ids, images)
            elif isinstance(event, BlockRemoved):
                self._rehash.removed(event.block_hashes)

    def get_publisher_config(self) -> None:
        # There is no endpoint, since there are no subscribers.
        ...

    def shutdown(self) -> None:
        # There is nothing to close.
        ...


def whole_context_group(groups: Sequence[Any]) -> int:
    """Return the index of the first group whose layers attend to all tokens; 0 if there is none.

    Layers with a window evict blocks that other sequences could still reuse.
    """
    return next((index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)), 0)


def transfers(request: Request) -> bool:
    """Return whether the request's KV comes from another engine."""
    params = request.kv_transfer_params
    return bool(params and (params.get("do_remote_prefill") or params.get("_remote_blocks_processed")))


def is_for_others(request: Request) -> bool:
    """Return whether the request's blocks are held for another engine."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def external_tokens(request: Request) -> int:
    """Return the number of tokens whose KV is requested from another engine.

    vLLM's own count of computed tokens also includes locally cached ones.
    """
    return int(request.prefill_stats.num_external_cached_tokens if request.prefill_stats else 0)


def lacks_images(request: Request) -> bool:
    """Return whether the request's prompt cannot be computed here, because this engine has no files of its images."""
    return any(feature.data is None for feature in request.mm_features)


def embedding_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of one token of an image's embedding; 0 for a model without images."""
    model = vllm_config.model_config
    return int(model.get_inputs_embeds_size() * model.dtype.itemsize) if model.supports_multimodal_inputs else 0
