"""Tests that vLLM accepts the arguments of profiles and parallel groups; nothing is loaded."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig, parallel_of
from libs.engine.vllm import plugin
from libs.engine.vllm.connectors import connector_of
from libs.engine.vllm.starting import KvFacts
from libs.launch.profile import load_profile, profile_names
from libs.perfmodel.utilisation import KvGroup, KvShape

pytestmark = pytest.mark.vllm

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
NODES = {"tensor_parallel_size": 16, "nnodes": 2, "master_addr": "10.0.0.1"}
RANK = {"data_parallel_size": 8, "data_parallel_rank": 3, "data_parallel_address": "10.0.0.1"}
SHARED = {"shared_storage_path": "/nowhere"}
FACTS = KvFacts(KvShape((KvGroup(32, 1),)), "LBHNC", has_states=False)
NOT_ON_CPUS = ("kv_cache_dtype",)


def built(folder: Path, shape: dict[str, Any], arguments: dict[str, Any], block_size_tokens: int = 64) -> Any:
    from libs.engine.vllm.launch import configured

    (folder / "config.json").write_text(json.dumps(shape))
    wanted = {name: value for name, value in arguments.items() if name not in NOT_ON_CPUS}
    config = EngineConfig(folder, "m", block_size_tokens=block_size_tokens, vllm_arguments=wanted)
    return configured(config, connector_of(config))


@pytest.mark.parametrize("name", profile_names())
def test_vllm_accepts_the_arguments_of_a_profile(name: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    for worker in load_profile(name).workers:
        AsyncEngineArgs(model=str(tmp_path), **worker.arguments)
        found = built(tmp_path, LLAMA_70B, worker.arguments, worker.block_size_tokens)
        assert found.parallel_config.world_size == parallel_of(worker.arguments).gpus == worker.gpus
        assert found.model_config.max_model_len == worker.arguments["max_model_len"]


@pytest.mark.parametrize("node", [0, 1])
def test_vllm_spreads_a_tensor_parallel_group_over_nodes_as_it_is_registered(node: int, tmp_path: Path) -> None:
    arguments = NODES | {"node_rank": node}
    parallel = built(tmp_path, LLAMA_70B, arguments).parallel_config
    requested = parallel_of(arguments)
    assert (parallel.world_size, parallel.nnodes_within_dp) == (requested.gpus, requested.nodes)
    assert (parallel.local_world_size, parallel.node_rank_within_dp) == (requested.gpus_here, node)


def test_kv_with_other_blocks_or_connectors_has_another_layout(tmp_path: Path) -> None:
    from libs.engine.vllm.launch import kv_layout

    nixl = connector_of(EngineConfig(tmp_path, "m"))
    store = connector_of(EngineConfig(tmp_path, "m", vllm_connector="ExampleConnector", vllm_connector_config=SHARED))
    here, other = (built(tmp_path, LLAMA_70B, {}, block_size_tokens=size) for size in (32, 64))
    layout = kv_layout(here, nixl, FACTS)
    assert "/80x8x128/tp2^n/LBHNC/block32" in layout
    assert kv_layout(other, nixl, FACTS) == layout.replace("block32", "block64")
    own = layout.replace("tp2^n", "tp1 (only NIXL reads other widths)")
    assert kv_layout(here, store, FACTS) == own.replace(nixl.layout, store.layout) != layout


def test_widths_that_nixl_can_read_have_one_layout_and_others_give_the_reason(tmp_path: Path) -> None:
    from libs.engine.vllm.launch import kv_layout

    nixl = connector_of(EngineConfig(tmp_path, "m"))
    layouts = [
        kv_layout(built(tmp_path, LLAMA_70B, {"tensor_parallel_size": width}), nixl, FACTS) for width in (1, 2, 8)
    ]
    assert len(set(layouts)) == 1
    many = built(tmp_path, LLAMA_70B, {"tensor_parallel_size": 16})
    assert kv_layout(many, nixl, FACTS) == layouts[0].replace("tp2^n", "tp16 (more ranks than its 8 KV heads)")
    mixed = KvFacts(FACTS.shape, "LBNHC", has_states=False)
    two, eight = (built(tmp_path, LLAMA_70B, {"tensor_parallel_size": width}) for width in (2, 8))
    assert kv_layout(two, nixl, mixed) != kv_layout(eight, nixl, mixed)


def test_the_layout_includes_the_kv_type_and_what_nixl_compares_unless_disabled(tmp_path: Path) -> None:
    from libs.engine.vllm.launch import kv_layout

    nixl = connector_of(EngineConfig(tmp_path, "m"))
    lax = connector_of(EngineConfig(tmp_path, "m", vllm_connector_config={"enforce_handshake_compat": False}))
    here = built(tmp_path, LLAMA_70B, {})
    layout = kv_layout(here, nixl, FACTS)
    assert kv_layout(here, nixl, FACTS, "0a1b") == f"{layout}/handshake-0a1b"
    assert kv_layout(here, lax, FACTS, "0a1b") == layout
    here.cache_config.cache_dtype = "bfloat16"
    assert kv_layout(here, nixl, FACTS) == layout.replace("float32", "float32+bfloat16")


def test_nixl_accepts_equal_weights_in_different_folders_and_detects_other_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import utils
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    configs = [built(folder, LLAMA_70B, {}) for folder in (here, there)]
    requested = [(config, backend) for config in configs for backend in ("FLASH_ATTN", "FLASHINFER")]
    monkeypatch.setattr(utils, "hash_factors", utils.hash_factors)  # put back after the test
    assert len({metadata.compute_nixl_compatibility_hash(*each) for each in requested}) == 4
    plugin.name_model("revision", tmp_path / "handshake")
    hashes = [metadata.compute_nixl_compatibility_hash(*each) for each in requested]
    assert hashes[:2] == hashes[2:] and hashes[0] != hashes[1]
    assert (tmp_path / "handshake").read_text() == hashes[-1]


def test_compiled_code_is_reused_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    def known_by(port: int) -> tuple[str, dict[str, object]]:
        for name in (plugin.NIXL_PORT, plugin.MOONCAKE_PORT):
            monkeypatch.setenv(name, str(port))
        return built(tmp_path, LLAMA_70B, {}).compute_hash(), envs.compile_factors()

    assert known_by(20_001) != known_by(20_002)
    monkeypatch.setattr(envs, "compile_factors", envs.compile_factors)  # put back after the test
    plugin.forget_ports()
    assert known_by(20_001) == known_by(20_002)


def test_a_second_group_on_a_node_is_refused_at_the_address_of_the_first(tmp_path: Path) -> None:
    from libs.engine.vllm.launch import _check_device

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = {**RANK, "data_parallel_rank": 0, "data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": port}
        with pytest.raises(StartupError, match=f"rank 0 .* 127.0.0.1:{port} .* a data_parallel_rpc_port for each"):
            _check_device(EngineConfig(tmp_path, "m", vllm_arguments=first))
        _check_device(EngineConfig(tmp_path, "m", vllm_arguments=first | {"data_parallel_rank": 1}))
    _check_device(EngineConfig(tmp_path, "m", vllm_arguments=first))


def test_vllm_accepts_one_rank_of_a_data_parallel_group_of_a_model_with_experts(tmp_path: Path) -> None:
    parallel = built(tmp_path, MIXTRAL, RANK).parallel_config
    assert parallel.data_parallel_external_lb and parallel.data_parallel_size_local == 1
    assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (8, 3)
    with pytest.raises(ValueError, match="launch independent vLLM"):
        built(tmp_path, LLAMA_70B, RANK)
