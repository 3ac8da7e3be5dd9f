"""Properties of a model that can be read without loading it: context, vocabulary, and the identity of its weights."""

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from libs.contracts.errors import StartupError
from libs.model.builtin import (
    BUILTIN_SIM,
    SIM_EOS,
    SIM_IM_END,
    SIM_MAX_CONTEXT_TOKENS,
    SIM_NAME,
    SIM_VOCAB_SIZE,
)
from libs.model.sampling import SamplingDefaults, sampling_defaults

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# Keys of config.json that differ between copies of the same weights.
_NOT_IDENTITY = ("_name_or_path", "transformers_version")
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of one model that gateways and workers use."""

    name: str
    path: Path | None
    """Folder in Hugging Face's layout; None for the built-in model."""
    revision: str
    """Equal on every machine with the same weights. It is the root of block hash chains."""
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


def load_model_info(path: str | Path, name: str | None = None) -> ModelInfo:
    """Read a folder's config files, or return the built-in model for "builtin:sim".

    Raise StartupError that names whatever is missing.
    """
    if str(path) == BUILTIN_SIM:
        eos = frozenset({SIM_EOS, SIM_IM_END})
        return ModelInfo(name or SIM_NAME, None, "builtin-sim-1", SIM_MAX_CONTEXT_TOKENS, SIM_VOCAB_SIZE, eos)
    folder = Path(path)
    if not folder.is_dir():
        raise StartupError(f"model folder {folder} does not exist")
    config = read_json(folder / "config.json")
    text_config = config.get("text_config") or config
    context = next((text_config[key] for key in _CONTEXT_KEYS if isinstance(text_config.get(key), int)), None)
    vocab_size = text_config.get("vocab_size")
    if context is None or not isinstance(vocab_size, int):
        raise StartupError(f"{folder / 'config.json'} lacks max_position_embeddings or vocab_size")
    advice = folder / "generation_config.json"
    generation = read_json(advice) if advice.exists() else {}
    return ModelInfo(
        name=name or folder.name,
        path=folder,
        revision=_revision(folder, config),
        max_context_tokens=context,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(folder, generation, text_config),
        sampling=sampling_defaults(generation, advice),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's file. Raise StartupError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


def _eos_token_ids(folder: Path, generation: dict[str, Any], text_config: dict[str, Any]) -> frozenset[int]:
    value = generation.get("eos_token_id")
    if value is None:
        value = text_config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise StartupError(f"{folder}: no eos_token_id in generation_config.json or config.json")
    return frozenset(ids)


def _revision(folder: Path, config: dict[str, Any]) -> str:
    """Return a hash of the config and of each weights file's name, size and samples.

    Samples save reading gigabytes at every start.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise StartupError(f"model folder {folder} holds no *.safetensors")
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    digest = blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        digest.update(json.dumps(read_json(index), sort_keys=True).encode())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
