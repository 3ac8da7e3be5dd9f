"""Which arguments of vLLM's engine are not a person's to choose, and what to set in their place. Pure, without vLLM."""

import json
from collections.abc import Iterable, Mapping
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
