"""Step-time profiles by model and device: shipped ones, those in files, and those learned by a running suite."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Final

from libs.contracts.errors import InvalidRequest, StartupError
from libs.perfmodel.learner import FittedModel, StepKind, combine
from libs.perfmodel.profiles import PROFILES, Profile, profile, shipped_entries
from libs.perfmodel.wire import MAX_COEFFICIENT_NS
from libs.policy.step_time import StepTimeModel

_TP = re.compile(r"-tp(\d+)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A profile together with measurements of a running suite."""

    profile: Profile
    mixed_measured: bool
    """True if the joint cost of prompts and decodes was measured; otherwise `interference` is an assumption."""
    chunk_tokens: int = 0
    """The maximum number of prompt tokens in a step; 0 means the smallest chunk that saturates the device."""
    hop_ms: float | None = None
    link_gbps: float | None = None
    max_sequences: int | None = None
    """Measurements of a suite; None if the lab's own default applies."""


def resolve(model: str, device: str, tp: int = 0) -> Hardware:
    """Return the profile of a model on a device, `tp` GPUs wide (0 means the only width available).

    Raise InvalidRequest, which lists the available profiles.
    """
    wanted, on = _plain(model), _plain(device)
    pairs = _pairs()
    found = [name for name, parts in pairs.items() if (_plain(parts[0]), _plain(parts[1])) == (wanted, on)]
    fits = [name for name in found if not tp or pairs[name][2] == tp]
    if len(fits) == 1 or (fits and len({pairs[name][2] for name in fits}) == 1):
        name = next((name for name in fits if name.endswith("-aic")), fits[0])
        return by_name(name)
    if found:
        widths = ", ".join(f"--tp {pairs[name][2]}" for name in found)
        raise InvalidRequest(f"{model} on {device} is there as {widths}: name one of them")
    devices = sorted({parts[1] for parts in pairs.values() if _plain(parts[0]) == wanted})
    if devices:
        raise InvalidRequest(f"there is no profile of {model} on {device}; it is there on {', '.join(devices)}")
    models = sorted({parts[0] for parts in pairs.values()})
    raise InvalidRequest(f"there is no profile of model {model!r}; there are {', '.join(models)}")


def by_name(name: str) -> Hardware:
    """Return the profile with this name; raise InvalidRequest, which lists similar names."""
    try:
        found = profile(name)
    except StartupError as error:
        raise InvalidRequest(error.message) from None
    return Hardware(found, bool(shipped_entries().get(name, {}).get("mixed_measured")))


def _pairs() -> dict[str, tuple[str, str, int]]:
    """Return (model, device, GPUs) by profile name, for all profiles that name a device."""
    found: dict[str, tuple[str, str, int]] = {}
    for name, entry in shipped_entries().items():
        device = str(entry["device"]).lower()
        found[name] = name[: name.index(f"-{device}")], device, int(entry["gpus"])
    for name, each in PROFILES.items():
        parts = _TP.sub("", name).rsplit("-", 1)
        if len(parts) == 2:
            found[name] = parts[0], parts[1], each.gpus
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


MAX_FILE_BYTES: Final = 65_536
MAX_BYTES: Final = 1 << 50
MAX_COUNT: Final = 1 << 20
_OPTIONAL_STEP_TIMES: Final = ("prefill_floor_ns", "decode_matrix_ns", "decode_wide_ns", "graph_exit_ns")
_OPTIONAL_BATCHES: Final = ("saturating_sequences", "graph_sequences")


def profile_named(text: str) -> Hardware:
    """Return the hardware from the file with this name, or else the shipped profile. Raise InvalidRequest."""
    path = Path(text)
    if path.is_file():
        return read_profile(path)
    if path.suffix == ".json" or path.parent != Path():
        raise InvalidRequest(f"there is no profile file {text}: `fulcrum lab calibrate --from-live` writes one")
    return by_name(text)


def write_profile(hardware: Hardware, path: Path, *, source: str, notes: Sequence[str] = ()) -> None:
    """Write a file from which `read_profile` rebuilds equal hardware. Raise InvalidRequest."""
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
    """Read a profile file; raise InvalidRequest, which names the missing or malformed key."""
    try:
        row = json.loads(path.read_bytes()[: MAX_FILE_BYTES + 1])
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{path} is not JSON of at most {MAX_FILE_BYTES} bytes") from None
    if not isinstance(row, dict) or not isinstance(row.get("step_time"), dict):
        raise InvalidRequest(f"{path} is no profile: it has no step_time")
    times = row["step_time"]
    step_time: dict[str, Any] = {
        each.name: _number(
            path,
            times,
            each.name,
            most=1 if each.name == "interference" else MAX_COEFFICIENT_NS,
            default=0 if each.name in _OPTIONAL_STEP_TIMES else None,
        )
        for each in fields(StepTimeModel)
        if each.name not in _OPTIONAL_BATCHES
    }
    batches = {name: _count(path, times, name, least=0, default=0) for name in _OPTIONAL_BATCHES}
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}: name is no text")
    profile = Profile(
        name=name,
        step_time=StepTimeModel(**step_time, **batches),
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


@dataclass(frozen=True, slots=True)
class LearnedWorker:
    """The speeds that one worker has measured and published about itself."""

    worker_id: str
    engine: str
    model: str
    device: str
    gpus: int
    fitted: FittedModel
    chunk_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    block_tokens: int
    max_sequences: int
    kv_token_ns: float = 0.0
    """The time to receive the KV of one token; 0 if none was received."""
    round_trip_ms: float = 0.0
    """Network round trip to the worker; 0 if it was not measured."""

    @property
    def kind(self) -> tuple[str, str, str, int]:
        """The key of workers that take the same time for equal steps."""
        return self.engine, self.model, self.device, self.gpus


def calibrated(name: str, workers: Sequence[LearnedWorker]) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware of workers of one kind, and notes on the parts that were not measured.

    Each kind of step is taken from the worker that has seen most of them, since prefill workers know little of decode.
    Raise InvalidRequest if there are no workers, or workers of several kinds.
    """
    if not workers:
        raise InvalidRequest("no worker has published a learned step-time model")
    kinds = {each.kind: each.worker_id for each in workers}
    if len(kinds) > 1:
        found = "; ".join(f"{model} on {device} ({example})" for (_, model, device, _), example in kinds.items())
        raise InvalidRequest(f"workers of {len(kinds)} kinds run: {found}; name a worker of one kind with --worker")
    best = {kind: _knows_most(workers, kind) for kind in StepKind}
    fits = {kind: each.fitted for kind, each in best.items()}
    unseen = [kind.value for kind, fit in fits.items() if not fit.of(kind).steps]
    prompts = best[StepKind.PREFILL]
    kv_bytes_per_token = prompts.kv_block_bytes // prompts.block_tokens
    profile = Profile(
        name=name,
        step_time=combine(workers[0].fitted.model, fits),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_memory_bytes=min(each.kv_blocks for each in workers) * prompts.kv_block_bytes,
        gpus=prompts.gpus,
    )
    links = [each.kv_token_ns for each in workers if each.kv_token_ns]
    trips = [each.round_trip_ms for each in workers if each.round_trip_ms]
    hardware = Hardware(
        profile,
        mixed_measured=StepKind.MIXED.value not in unseen,
        chunk_tokens=prompts.chunk_tokens,
        hop_ms=median(trips) / 2 if trips else None,
        link_gbps=kv_bytes_per_token * 8 / median(links) if links else None,
        max_sequences=min(each.max_sequences for each in workers),
    )
    notes = []
    if unseen:
        notes.append(f"No {' or '.join(unseen)} step was seen since these workers began: what is kept, or a guess.")
    if not links:
        notes.append("No KV was transferred lately: the lab's own link is taken.")
    return hardware, tuple(notes)


def _knows_most(workers: Sequence[LearnedWorker], kind: StepKind) -> LearnedWorker:
    return max(workers, key=lambda each: each.fitted.of(kind).steps)
