"""Sampling defaults that a model's makers recommend (generation_config.json), for requests that set none
themselves.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from libs.contracts.errors import StartupError

_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling defaults of a model, named as in the API. These values are the API's own, for models without
    any.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(generation_config: dict[str, Any], path: Path) -> SamplingDefaults:
    """Return the defaults in a generation_config.json. Raise StartupError that names an invalid field."""
    advised = {
        field.name: generation_config[field.name]
        for field in fields(SamplingDefaults)
        if generation_config.get(field.name) is not None
    }
    for name, value in advised.items():
        low, high = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise StartupError(f"{path}: {name} is {value!r}, not a number from {low} to {high}")
    if generation_config.get("do_sample") is False:
        advised["temperature"] = 0.0
    if advised.get("top_p") == 0:
        del advised["top_p"]  # some files mean "off" by it
    return SamplingDefaults(**advised)
