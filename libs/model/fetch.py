"""The resolution of a user's model to a folder.

A user names the bundled model, a folder, or a model on the Hugging Face hub.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from libs.contracts.errors import StartupError
from libs.model.info import BUILTIN_SIM, SIM_NAME, load_model_info
from libs.runtime.paths import cache_dir

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# A name that is neither a folder nor the bundled model names a simulated model.
_SIM_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]{0,199}")

Helper = Callable[[str, tuple[str, ...]], Awaitable[str]]
"""A function that runs a command in a separate process under a display name. It returns the path that the process
reports; empty if there is none.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve: its name in requests, and its folder or builtin:sim."""

    name: str
    path: str


# The assumed size of a simulated model without a folder: 8.03 billion parameters of two bytes, as in Llama 3.1 8B.
SIM_SIZE_BYTES = 16_060_522_496


def size_bytes(model: Model) -> int:
    """Return the bytes of the weights in the model's folder, or an assumed size without a folder."""
    if model.path == BUILTIN_SIM:
        return SIM_SIZE_BYTES
    return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))


async def resolve_model(spec: str | None, *, engine: str, helper: Helper) -> Model:
    """Return the model for `--model`, and download or convert it if necessary. Raise StartupError."""
    if engine == "sim" and spec in (None, SIM_NAME, BUILTIN_SIM):
        return Model(SIM_NAME, BUILTIN_SIM)
    folder = _folder(spec) if spec else None
    if engine == "sim" and spec is not None and folder is None and _SIM_NAME.fullmatch(spec) and spec != BUNDLED_MODEL:
        return Model(spec, BUILTIN_SIM)
    if folder is not None:
        return _checked(folder.name, folder)
    if spec is None or spec == BUNDLED_MODEL:
        return _checked(BUNDLED_MODEL, await _bundled(helper))
    if _HUB_NAME.fullmatch(spec):
        return _checked(spec, Path(await helper("download", ("python", "-m", "libs.model.prepare", spec))))
    raise StartupError(
        f"there is no model {spec!r}: name a folder, a Hugging Face model as ORG/NAME, "
        f"or leave --model out for {BUNDLED_MODEL}"
    )


def _folder(spec: str) -> Path | None:
    folder = Path(spec).expanduser()
    return folder.resolve() if folder.is_dir() else None


def _checked(name: str, folder: Path) -> Model:
    # A fault is reported here in one line, rather than by every process.
    load_model_info(folder)
    if not (folder / "tokenizer.json").is_file():
        raise StartupError(f"model folder {folder} lacks tokenizer.json: save it with a fast tokenizer")
    return Model(name, str(folder))


async def _bundled(helper: Helper) -> Path:
    folder = cache_dir() / "models" / BUNDLED_MODEL
    if not (folder / "config.json").is_file():
        await helper("convert", ("python", "-m", "libs.engine.torch.convert", str(folder)))
    return folder
