"""Which arguments of vLLM's engine are not a person's to choose, and what to set in their place. Pure, without vLLM."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from libs.engine.parallel import SETTING
from libs.engine.vllm.connectors import CONFIG_SETTING, CONNECTOR_SETTING

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


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for one that would replace the worker's own."""
    found = [f"{name}: {why}" for name, why in RESERVED.items() if name in arguments]
    if found:
        raise ValueError(f"{SETTING} cannot have {'; '.join(found)}")
