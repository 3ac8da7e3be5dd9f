"""Profiles that come with the package: fitted to public measurements by `python -m load.make_profiles`."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

SHIPPED_FILE: Final = Path(__file__).parent / "data" / "profiles.json"


@cache
def shipped_entries() -> Mapping[str, Mapping[str, Any]]:
    """By name, as in the file: `step_time`, `gpus`, `kv_bytes_per_token`, `kv_memory_bytes`, `device`, `source`."""
    found = json.loads(SHIPPED_FILE.read_text())["profiles"]
    return MappingProxyType({entry["name"]: entry for entry in found})
