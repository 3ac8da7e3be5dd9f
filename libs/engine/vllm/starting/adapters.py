"""LoRA adapters in vLLM: what its engine has to be given room for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import StartupError

RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has room for."""


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


def _rank(name: str, folder: Path) -> int:
    file = folder / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"adapter {name!r}: {file} cannot be read: {error}") from None
