"""Tests of the bytes of a model's KV against vLLM's own layout, for published shapes without weights."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.engine.config import EngineConfig
from libs.engine.vllm.connectors import connector_of
from libs.perfmodel.utilisation import KvGroup, KvShape

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CONTEXT_TOKENS = 8192
BLOCKS = 1000
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "vocab_size": 129280, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "head_dim": 64, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 5376,
    "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 168,
    "vocab_size": 262208, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.25,
}  # fmt: skip
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, init_distributed_environment

    store = tmp_path_factory.mktemp("ranks") / "store"
    init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    yield
    cleanup_dist_env_and_memory()


def configured(folder: Path, shape: dict[str, Any], block_tokens: int = 64) -> Any:
    from libs.engine.vllm import launch

    (folder / "config.json").write_text(json.dumps(shape))
    # States in float32, as on GPUs and CPUs that compute bfloat16; elsewhere vLLM takes the model's type for them.
    arguments = {"max_model_len": CONTEXT_TOKENS, "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    config = EngineConfig(folder, "m", block_size_tokens=block_tokens, vllm_arguments=arguments)
    return launch.configured(config, connector_of(config))


def specs_of(vllm_config: Any) -> dict[str, Any]:
    """Return what each layer of vLLM's own model declares to keep; parameters have shapes and no memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import destroy_model_parallel, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config):
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            initialize_model(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    found = {
        name: layer.get_kv_cache_spec(vllm_config)
        for name, layer in layers.items()
        if hasattr(layer, "get_kv_cache_spec")
    }
    return {name: spec for name, spec in found.items() if spec is not None}


def laid_out(vllm_config: Any, specs: dict[str, Any], order: str = "LBHNC") -> Any:
    """Return vLLM's layout of them, as its scheduler gets it."""
    from vllm.v1.core import kv_cache_utils as utils

    vllm_config.cache_config.kv_cache_layout = order
    vllm_config.cache_config.num_gpu_blocks_override = BLOCKS
    groups = utils.get_kv_cache_groups(vllm_config, specs)
    config = utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    config.kv_cache_layout = order
    return utils.generate_scheduler_kv_cache_config([config])


def shape_of(vllm_config: Any, specs: dict[str, Any], order: str = "LBHNC") -> KvShape:
    from libs.engine.vllm.kv_groups import kv_shape

    return kv_shape(vllm_config, laid_out(vllm_config, specs, order))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LLAMA_70B, (80 * 2 * 8 * 128 * 2, 0, 0, 0)),
        (DEEPSEEK_V3, (61 * (512 + 64) * 2, 0, 0, 0)),
        (GPT_OSS_120B, (18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2, 128, 0)),
        (GEMMA3_27B, (10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 1024, 0)),
        (QWEN3_NEXT_80B, (12 * 2 * 2 * 256 * 2, 0, 0, 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4))),
    ],
    ids=["llama-70b", "deepseek-v3", "gpt-oss-120b", "gemma3-27b", "qwen3-next-80b"],
)
def test_kv_has_the_bytes_of_vllms_own_layers(
    one_rank: None, tmp_path: Path, model: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Of a token in layers with full attention, with windows, tokens of a window, bytes of states."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    vllm_config = configured(tmp_path, model)
    specs = specs_of(vllm_config)
    shape = shape_of(vllm_config, specs)
    assert (shape.token_bytes, shape.window_token_bytes, shape.window_tokens, shape.state_bytes) == expected
    whole = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
    theirs = sum(spec.max_memory_usage_bytes(vllm_config) for spec in whole)
    kept = KvShape(tuple(group for group in shape.groups if not group.window_tokens))
    assert kept.sequence_bytes(CONTEXT_TOKENS) == theirs


def test_a_hand_over_of_windows_takes_the_blocks_that_nixl_requests(one_rank: None, tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

    vllm_config = configured(tmp_path, GPT_OSS_120B)
    specs = specs_of(vllm_config)
    config = laid_out(vllm_config, specs)
    scheduler = NixlPullConnectorScheduler(vllm_config, "engine", config)
    (theirs,) = (blocks for blocks in scheduler.blocks_per_sw if blocks)
    (windows,) = (group for group in shape_of(vllm_config, specs).groups if group.window_tokens)
    assert windows.blocks(CONTEXT_TOKENS) == theirs


def test_a_latent_counts_once_at_any_width_and_heads_once_per_part(one_rank: None, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("latent", "heads")]
    for folder, model in zip(folders, (DEEPSEEK_V3, LLAMA_70B), strict=True):
        folder.mkdir()
        vllm_config = configured(folder, model)
        specs = specs_of(vllm_config)
        alone = shape_of(vllm_config, specs)
        for width in (2, 8, 16):
            vllm_config.parallel_config.tensor_parallel_size = width
            split = {
                name: spec if model is DEEPSEEK_V3 else replace(spec, num_kv_heads=max(8 // width, 1))
                for name, spec in specs.items()
            }
            assert shape_of(vllm_config, split) == alone


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_layers_of_one_group_with_different_pages_are_summed(one_rank: None, tmp_path: Path, order: str) -> None:
    """DeepSeek V3.2 keeps an index of 132 bytes a token beside the latent."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    def latent(items: int, dtype: torch.dtype) -> Any:
        return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=items, dtype=dtype, max_tp_shards=1)

    vllm_config = configured(tmp_path, DEEPSEEK_V3)
    specs = {f"{layer}.latent": latent(576, torch.bfloat16) for layer in range(61)}
    specs |= {f"{layer}.index": latent(132, torch.uint8) for layer in range(61)}
    assert shape_of(vllm_config, specs, order) == KvShape((KvGroup(64, 61 * 64 * (576 * 2 + 132)),))


@pytest.mark.parametrize(("name", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_a_number_in_kv_has_the_width_of_its_own_type(
    one_rank: None, tmp_path: Path, name: str, item_bytes: int
) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=128, dtype=getattr(torch, name))
    vllm_config = configured(tmp_path, LLAMA_70B)
    assert shape_of(vllm_config, {str(layer): spec for layer in range(80)}).token_bytes == 80 * 2 * 8 * 128 * item_bytes


def test_a_ring_of_one_block_counts_once_per_sequence(one_rank: None, tmp_path: Path) -> None:
    import torch
    from vllm.v1 import kv_cache_interface

    if not hasattr(kv_cache_interface, "CircularBufferSpec"):
        pytest.skip("this vLLM has no such layers")
    heads = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    vllm_config = configured(tmp_path, LLAMA_70B)
    specs: dict[str, Any] = {
        str(layer): kv_cache_interface.FullAttentionSpec(block_size=64, **heads) for layer in range(2)
    }
    alone = shape_of(vllm_config, specs)
    ring = kv_cache_interface.CircularBufferSpec(block_size=64, **heads)
    shape = shape_of(vllm_config, specs | {"2": ring, "3": ring})
    assert shape == replace(alone, state_bytes=2 * ring.max_memory_usage_bytes(vllm_config))
