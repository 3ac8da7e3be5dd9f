"""vLLM's engine arguments and environment: which ones users may set, and which the worker sets.

Pure, without vLLM.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.engine.config import SETTING, EngineConfig
from libs.engine.port import Pooling
from libs.engine.vllm.connectors import CONFIG_SETTING, CONNECTOR_SETTING, Connector
from libs.engine.vllm.plugin import LEASH_VARIABLE, MOONCAKE_PORT, NIXL_PORT, REVISION_VARIABLE, WAIT_VARIABLE
from libs.model.files import read_json
from libs.model.info import is_encoder, load_embedding, load_model_info

SET: Final = "set FULCRUM_WORKER_{name} in its place"
CHUNKS: Final = "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS says how prompts are cut"
FIXED: Final = "the worker's scheduler and its reports rest on what it is"

# The arguments that users may not set, each with its alternative or the reason.
RESERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": SET.format(name="MODEL_PATH"),
        "served_model_name": SET.format(name="MODEL"),
        "block_size": SET.format(name="BLOCK_SIZE_TOKENS"),
        "max_num_seqs": SET.format(name="MAX_SEQUENCES"),
        "pooler_config": "the model's modules.json says how its vectors are pooled",
        "enable_chunked_prefill": CHUNKS,
        "kv_transfer_config": f"{CONNECTOR_SETTING} and {CONFIG_SETTING} say how KV is handed over",
        **dict.fromkeys(
            (
                "additional_config",
                "enable_tower_connector_lora",
                "disable_log_stats",
                "generation_config",
                "kv_events_config",
                "mm_processor_cache_gb",
                "scheduler_cls",
                "scheduling_policy",
                "skip_tokenizer_init",
            ),
            FIXED,
        ),
    }
)
EXTENSION: Final = "libs.engine.vllm.plugin.MemoryReport"
# The fraction of a GPU's memory that an engine fills by default, equal to vLLM's own default.
LOADED_SHARE: Final = 0.92
MB: Final = 1024 * 1024
# The ranks of LoRA adapters that vLLM supports.
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)


def parse_arguments(words: Iterable[str]) -> dict[str, Any]:
    """Parse arguments of the form KEY=VALUE, or KEY for true.

    Keys are spelled as in vLLM or on its command line. A value that is not JSON is text. Raise ValueError for a
    malformed argument, and for one that users may not set.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        if not name.isidentifier():
            raise ValueError(f"{word!r} is not an engine argument: write KEY=VALUE, e.g. tensor_parallel_size=2")
        if name in found:
            raise ValueError(f"engine argument {name} is given twice")
        found[name] = _value(value) if equals else True
    check_arguments(found, "--engine-arg")
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_arguments(arguments: Mapping[str, Any], where: str = SETTING) -> None:
    """Raise ValueError for an argument that users may not set. `where` names the setting in the message."""
    found = [f"{name}: {why}" for name, why in RESERVED.items() if name in arguments]
    if found:
        raise ValueError(f"{where} cannot have {'; '.join(found)}")


def pooling_of(config: EngineConfig) -> Pooling | None:
    """Return the pooling method of an engine that gives embeddings; None for an engine that generates.

    As in vLLM's own server, a folder with files of Sentence Transformers selects embeddings unless `runner` is set.
    Raise StartupError for a model whose pooling is not supported.
    """
    assert config.model_path is not None
    model = read_json(config.model_path / "config.json")
    if is_encoder(model):
        raise StartupError("the model is an encoder, which the engine torch serves: start with --engine torch")
    embedding = load_embedding(config.model_path, model)
    runner = config.vllm_arguments.get("runner", "auto")
    if runner not in {"auto", "pooling"} or (runner == "auto" and not embedding.listed):
        return None
    if embedding.unserved:
        raise StartupError(f"the model gives no embeddings here: {embedding.unserved}")
    return Pooling(embedding.pooling)


def pooling_arguments(pooling: Pooling, config: EngineConfig, *, step_tokens: int) -> dict[str, Any]:
    """Return vLLM's arguments for an engine that gives embeddings and computes up to `step_tokens` in a step.

    vLLM does not normalise the vectors; the gateway does.
    """
    found: dict[str, Any] = {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"pooling_type": pooling.name, "use_activation": False},
    }
    if pooling is Pooling.MEAN:
        # vLLM only supports a mean over whole prompts, so one step must fit the longest prompt.
        assert config.model_path is not None
        longest = config.vllm_arguments.get("max_model_len") or load_model_info(config.model_path).max_context_tokens
        found |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
        found["max_num_batched_tokens"] = max(step_tokens, longest) if isinstance(longest, int) else step_tokens
    return found


def vision_arguments(*, serves: bool) -> dict[str, Any]:
    """Return vLLM's arguments for a vision model that `serves` images or only text.

    vLLM's image processor needs a tokenizer. vLLM's cache of processed images is off, so each image is sent with its
    prompt, unless the prompt's KV comes from another engine.
    """
    return {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0, "language_model_only": not serves}


def adapter_arguments(folders: Mapping[str, Path], most: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for adapters by name. All are kept in host memory, and `most` of them on the device.

    Raise StartupError for a folder that is not an adapter. On CPUs each adapter has a slot, and one more slot remains
    empty. If a step has sequences with and without an adapter, vLLM's CPU kernels compute the latter with the last slot
    (index -1).
    """
    ranks = [_rank(name, folder) for name, folder in folders.items()]
    room = next((rank for rank in RANKS if rank >= max(ranks)), None)
    if room is None:
        raise StartupError(f"an adapter has rank {max(ranks)}; vLLM serves up to {RANKS[-1]}")
    on_device = len(folders) + 1 if on_cpu else min(most, len(folders))
    return {
        "enable_lora": True,
        "max_loras": on_device,
        "max_cpu_loras": max(on_device, len(folders)),
        "max_lora_rank": room,
    }


def can_sleep(config: EngineConfig, connector: Connector, *, available: bool) -> bool:
    """Return whether to start an engine so that it can sleep. `available` is true if vLLM supports sleep on the device.

    A user's `worker_extension_cls` or `kv_cache_memory_bytes` rules it out. With the latter, the engine fills the same
    memory whatever other engines use.
    """
    given = config.vllm_arguments
    free = given.get("enable_sleep_mode", True) and not given.keys() & {"worker_extension_cls", "kv_cache_memory_bytes"}
    return bool(config.vllm_sleeps and available and connector.outlives_sleep and free)


def sleep_arguments(config: EngineConfig, device_bytes: int) -> dict[str, Any]:
    """Return vLLM's arguments for an engine that can sleep on GPUs with `device_bytes` of memory.

    The engine leaves the memory that is reserved for sleeping engines. These arguments override a user's own. Raise
    StartupError if no memory is left.
    """
    fills = float(config.vllm_arguments.get("gpu_memory_utilization", LOADED_SHARE))
    left = fills * config.gpu_share - config.vllm_asleep_mb * MB / device_bytes
    if left <= 0:
        raise StartupError(
            f"FULCRUM_WORKER_ASLEEP_GPU_MEMORY_MB leaves nothing of a GPU of {device_bytes // MB} MB to models that"
            " serve: set less"
        )
    return {"enable_sleep_mode": True, "gpu_memory_utilization": left, "worker_extension_cls": EXTENSION}


def _rank(name: str, folder: Path) -> int:
    file = folder / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"adapter {name!r}: {file} cannot be read: {error}") from None


def default_environment(config: EngineConfig, *, on_cpu: bool) -> Mapping[str, str]:
    """Return the environment variables to set unless the user has set them."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(max(config.kv_lease_ms // 1000, 1)),
    }
    if not on_cpu:
        # Without NVLink, as on a single GPU, UCX reads over TCP unless CUDA IPC is enabled explicitly.
        environment["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    else:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads or 1),
            "UCX_TLS": "tcp,shm,self,cma",
            WAIT_VARIABLE: "1",
        }
    return environment


def own_environment(
    *, host: str, nixl_port: int, mooncake_port: int, revision: str, worker_pid: int
) -> Mapping[str, str]:
    """Return the environment variables that users cannot choose.

    Processes are spawned. A forked process would not load the plug-in, because its parent has already loaded it.
    """
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_HOST_IP": host,
        NIXL_PORT: str(nixl_port),
        MOONCAKE_PORT: str(mooncake_port),
        LEASH_VARIABLE: str(worker_pid),
        REVISION_VARIABLE: revision,
    }
