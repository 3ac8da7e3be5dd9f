"""Profile files: the hardware of an experiment as JSON, as `fulcrum lab calibrate` writes it."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import InvalidRequest
from libs.lab.hardware import Hardware, by_name
from libs.perfmodel.profiles import Profile
from libs.perfmodel.wire import MAX_COEFFICIENT_NS
from libs.policy.step_time import StepTimeModel

MAX_FILE_BYTES: Final = 65_536
MAX_BYTES: Final = 1 << 50
MAX_COUNT: Final = 1 << 20
_OPTIONAL_STEP_TIMES: Final = ("prefill_floor_ns", "decode_matrix_ns")


def profile_named(text: str) -> Hardware:
    """Return the hardware of the file with this name, else the shipped profile. Raises InvalidRequest."""
    path = Path(text)
    if path.is_file():
        return read_profile(path)
    if path.suffix == ".json" or path.parent != Path():
        raise InvalidRequest(f"there is no profile file {text}: `fulcrum lab calibrate --from-live` writes one")
    return by_name(text)


def write_profile(hardware: Hardware, path: Path, *, source: str, notes: Sequence[str] = ()) -> None:
    """Write a file from which `read_profile` rebuilds equal hardware. Raises InvalidRequest."""
    profile = hardware.profile
    row = {
        **asdict(profile),
        "mixed_measured": hardware.mixed_measured,
        "chunk_tokens": hardware.chunk_tokens,
        "hop_ms": hardware.hop_ms,
        "link_gbps": hardware.link_gbps,
        "max_sequences": hardware.max_sequences,
        "source": source,
        "notes": list(notes),
    }
    try:
        path.write_text(json.dumps({name: value for name, value in row.items() if value is not None}, indent=1) + "\n")
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written: {error.strerror or error}") from error


def read_profile(path: Path) -> Hardware:
    """Read a profile file; raise InvalidRequest that names the missing or malformed key."""
    try:
        row = json.loads(path.read_bytes()[: MAX_FILE_BYTES + 1])
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{path} is not JSON of at most {MAX_FILE_BYTES} bytes") from None
    if not isinstance(row, dict) or not isinstance(row.get("step_time"), dict):
        raise InvalidRequest(f"{path} is no profile: it has no step_time")
    times = row["step_time"]
    step_time = {
        each.name: _number(
            path,
            times,
            each.name,
            most=1 if each.name == "interference" else MAX_COEFFICIENT_NS,
            default=0 if each.name in _OPTIONAL_STEP_TIMES else None,
        )
        for each in fields(StepTimeModel)
    }
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}: name is no text")
    profile = Profile(
        name=name,
        step_time=StepTimeModel(**step_time),
        kv_bytes_per_token=_count(path, row, "kv_bytes_per_token", most=MAX_BYTES),
        kv_memory_bytes=_count(path, row, "kv_memory_bytes", most=MAX_BYTES),
        gpus=_count(path, row, "gpus", default=1),
    )
    return Hardware(
        profile,
        mixed_measured=row.get("mixed_measured") is True,
        chunk_tokens=_count(path, row, "chunk_tokens", least=0, default=0),
        hop_ms=_number(path, row, "hop_ms", most=60_000) if "hop_ms" in row else None,
        link_gbps=_number(path, row, "link_gbps", least=1e-6, most=1e6) if "link_gbps" in row else None,
        max_sequences=_count(path, row, "max_sequences") if "max_sequences" in row else None,
    )


def _number(
    path: Path, row: dict[str, Any], name: str, *, least: float = 0, most: float, default: float | None = None
) -> float:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{path}: {name} is no number" if name in row else f"{path}: {name} is missing")
    if not least <= value <= most:
        raise InvalidRequest(f"{path}: {name} is {value:g}: it has to be {least:g} to {most:g}")
    return value


def _count(
    path: Path, row: dict[str, Any], name: str, *, least: int = 1, most: int = MAX_COUNT, default: int | None = None
) -> int:
    value = _number(path, row, name, least=least, most=most, default=default)
    if value != int(value):
        raise InvalidRequest(f"{path}: {name} is {value:g}, no whole number")
    return int(value)
