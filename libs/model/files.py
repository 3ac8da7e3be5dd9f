"""The JSON files in a model's folder."""

import json
from pathlib import Path
from typing import Any

from libs.contracts.errors import StartupError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's file. Raise StartupError that names the file."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's file; empty if there is no file. Raise StartupError that names the file."""
    return read_json(path) if path.is_file() else {}


def read_any_json(path: Path) -> Any:
    """Return the JSON value in a model's file. Raise StartupError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from None
