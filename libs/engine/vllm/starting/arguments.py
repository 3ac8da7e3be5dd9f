"""Arguments of vLLM's engine: which are not a person's to choose, with what to set in their place, and those that LoRA
adapters need. Without vLLM."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.parallel import SETTING
from libs.engine.vllm.connectors import CONFIG_SETTING, CONNECTOR_SETTING, Connector

SET: Final = "set FULCRUM_WORKER_{name} in its place"
CHUNKS: Final = "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS says how prompts are cut"
FIXED: Final = "the worker's scheduler and its reports rest on what it is"

RESERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": SET.format(name="MODEL_PATH"),
        "served_model_name": SET.format(name="MODEL"),
        "block_size": SET.format(name="BLOCK_SIZE_TOKENS"),
        "max_num_seqs": SET.format(name="MAX_SEQUENCES"),
        "enable_chunked_prefill": CHUNKS,
        "kv_transfer_config": f"{CONNECTOR_SETTING} and {CONFIG_SETTING} say how KV is handed over",
        **dict.fromkeys(
            (
                "additional_config",
                "disable_log_stats",
                "generation_config",
                "kv_events_config",
                "scheduler_cls",
                "scheduling_policy",
                "skip_tokenizer_init",
            ),
            FIXED,
        ),
    }
)
"""With why."""
EXTENSION: Final = "libs.engine.vllm.starting.extension.MemoryReport"
LOADED_SHARE: Final = 0.92
"""Of a GPU's memory that an engine fills where nobody says otherwise, as by vLLM's own default."""
MB: Final = 1024 * 1024
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of LoRA adapters that vLLM has room for."""


def parse_arguments(words: Iterable[str]) -> dict[str, Any]:
    """Arguments of KEY=VALUE or, where it is true, KEY: in vLLM's spelling or its command line's, with a value in JSON
    or as it stands. Raises ValueError for what is neither and for one that is not a person's to choose."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        if not name.isidentifier():
            raise ValueError(f"{word!r} is no engine argument: write KEY=VALUE, e.g. tensor_parallel_size=2")
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
    """Raises ValueError for one that would replace the worker's own; `where` they were given."""
    found = [f"{name}: {why}" for name, why in RESERVED.items() if name in arguments]
    if found:
        raise ValueError(f"{where} cannot have {'; '.join(found)}")


def adapter_arguments(folders: Mapping[str, Path], most: int, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for adapters by name, of which `most` are on the device and all stay in host memory. Raises
    StartupError for a folder that is none.

    vLLM's kernels for CPUs compute sequences without an adapter by the last place for one (index -1), where another's
    computes beside them: there each adapter has a place, and the last one stays empty.
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
    """Whether an engine is started so that it can sleep. `available`: on this kind of device, by vLLM.

    Not where a person's arguments rule it out: `kv_cache_memory_bytes` fixes what it fills, whatever others leave.
    """
    given = config.vllm_arguments
    free = given.get("enable_sleep_mode", True) and not given.keys() & {"worker_extension_cls", "kv_cache_memory_bytes"}
    return bool(config.vllm_sleeps and available and connector.outlives_sleep and free)


def sleep_arguments(config: EngineConfig, device_bytes: int) -> dict[str, Any]:
    """vLLM's arguments for an engine that can sleep, on GPUs of so much memory, which leaves the others that sleep
    there their part of what it would fill: they stand above a person's own. Raises StartupError where nothing is
    left."""
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
