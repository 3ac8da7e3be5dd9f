"""Models of Hugging Face folders in transformers, and their LoRA adapters.

An adapter is a folder in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`. The engine is started
with it, or a sequence names its folder. The first step that needs an adapter reads its weights. Beyond the limit, the
least recently used adapter is dropped.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from libs.contracts.errors import StartupError, one_line
from libs.engine.runner import Chunk
from libs.engine.torch.attention import ATTENTION_NAME, BlockShape, paged_attention

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_SIDES: Final = (".lora_A.weight", ".lora_B.weight")
# Config keys that ask for more than a low-rank addition with one scale.
_UNSERVED: Final = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication")


class AdapterBroken(Exception):
    """An adapter that cannot be read, or does not fit the model. A sequence that requests it fails."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A low-rank addition to one layer's output: `x @ down @ up`."""

    down: torch.Tensor
    """[in, rank] in the layer's dtype and on its device."""
    up: torch.Tensor
    """[rank, out], multiplied by the adapter's scale."""


_Loaded = Mapping[str, Addition]
"""The additions of an adapter, by the name of the layer."""


class Adapters:
    """The adapters of one model. Not thread-safe."""

    def __init__(self, model: Any, folders: Mapping[str, Path], most: int) -> None:
        """Check the adapters in `folders`, given by name. Raise StartupError for one that is missing or unsupported.

        At most `most` adapters remain loaded, or as many as a single step needs.
        """
        self._folders = folders
        self._most = most
        for name, folder in folders.items():
            _scale(name, folder)
        # The rows of a step are tokens. A vision tower computes no tokens.
        modules = ((name, each) for name, each in model.named_modules() if not name.startswith(VISION_MODULES))
        self._layers = {name: each for name, each in modules if isinstance(each, torch.nn.Linear)}
        self._kept: OrderedDict[str, _Loaded] = OrderedDict()
        self._rows: list[tuple[slice, _Loaded]] = []
        """The rows of the running step that use an adapter, with its additions."""
        # Hooks are registered with the first adapter, because each costs a call per layer and step.
        self._hooked = False

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the loaded adapters, the most recently used last."""
        return tuple(self._kept)

    def use(self, chunks: Sequence[Chunk]) -> dict[int, str]:
        """Load the adapters of the next step's chunks, which form its row in order.

        Return the reason for each chunk whose adapter cannot be loaded, by index.
        """
        faults: dict[int, str] = {}
        self._rows, first = [], 0
        for place, chunk in enumerate(chunks):
            end = first + len(chunk.token_ids)
            if chunk.adapter:
                try:
                    self._rows.append((slice(first, end), self._load(chunk.adapter, chunk.adapter_source)))
                except AdapterBroken as error:
                    faults[place] = str(error)
            first = end
        needed = {chunk.adapter for chunk in chunks}
        for name in [name for name in self._kept if name not in needed][: max(len(self._kept) - self._most, 0)]:
            del self._kept[name]
        return faults

    def drop(self) -> None:
        """Drop all weights before the device is freed."""
        self._rows = []
        self._kept.clear()

    def _load(self, name: str, source: str) -> _Loaded:
        found = self._kept.get(name)
        if found is None:
            try:
                found = self._read(name, self._folders.get(name) or Path(source))
            except AdapterBroken:
                raise
            except StartupError as error:
                raise AdapterBroken(error.message) from error
            except Exception as error:  # safetensors raises its own exception class in addition to OSError
                raise AdapterBroken(f"adapter {name!r} cannot be read: {one_line(error, 200)}") from error
            self._kept[name] = found
        self._kept.move_to_end(name)
        if not self._hooked:
            self._hooked = True
            for layer_name, layer in self._layers.items():
                layer.register_forward_hook(self._hook(layer_name))
        return found

    def _read(self, name: str, folder: Path) -> _Loaded:
        scale, tensors = _scale(name, folder), load_file(folder / WEIGHTS)
        found: dict[str, Addition] = {}
        for key in sorted(tensors):
            layer_name = key.removeprefix(_PREFIX).removesuffix(_SIDES[0])
            if not key.endswith(_SIDES):
                raise AdapterBroken(f"adapter {name!r} has {key}, which is no LoRA weight of a linear layer")
            if not key.endswith(_SIDES[0]):
                continue
            layer, up = self._layers.get(layer_name), tensors[key.removesuffix(_SIDES[0]) + _SIDES[1]]
            down = tensors[key]
            if layer is None or down.shape[1] != layer.in_features or up.shape[0] != layer.out_features:
                raise AdapterBroken(f"adapter {name!r} does not fit this model: it adds to {layer_name}")
            like = layer.weight
            scaled = up.to(torch.float32) * scale
            found[layer_name] = Addition(down.T.contiguous().to(like), scaled.T.contiguous().to(like))
        return found

    def _hook(self, name: str) -> Any:
        def add(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            # `inputs` is [1, tokens, in]. `output` [1, tokens, out] is changed in place.
            for rows, loaded in self._rows:
                addition = loaded.get(name)
                if addition is not None:
                    output[0, rows] += inputs[0][0, rows] @ addition.down @ addition.up

        return add


def _scale(name: str, folder: Path) -> float:
    """Return the adapter's scale. Raise StartupError if the adapter is unsupported."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"adapter {name!r}: {folder / CONFIG} cannot be read: {error}") from None
    if not (folder / WEIGHTS).is_file():
        raise StartupError(f"adapter {name!r}: {folder / WEIGHTS} is missing")
    odd = next((key for key in _UNSERVED if config.get(key)), "")
    if config.get("peft_type") != "LORA" or odd or config.get("bias", "none") != "none":
        raise StartupError(
            f"adapter {name!r} is not served: only plain LoRA is, without {odd or 'other types, or biases'}"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
# The minimum compute capability of CUDA devices. Older ones emulate bfloat16, which is slower than float32.
BFLOAT16_CAPABILITY = (8, 0)
# Rotary embeddings that change with the longest sequence of a batch, so stored keys would become wrong.
CONTEXT_DEPENDENT_ROPE = ("dynamic", "longrope")


def pick_device(wanted: str) -> torch.device:
    """Return the device for a setting such as "auto", "cpu" or "cuda:1". Raise StartupError."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise StartupError(f"device={wanted} is unknown: use auto, cpu or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device={wanted} is not served: use auto, cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(
            f"device={wanted} is not there (torch sees {torch.cuda.device_count()} CUDA devices): use cpu"
        )
    return device


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the type for a setting. Raise StartupError for an unknown one.

    "auto" selects bfloat16 on GPUs that support it, otherwise float32.
    """
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
        return torch.bfloat16 if fast else torch.float32
    if wanted not in DTYPES:
        raise StartupError(f"dtype={wanted} is unknown: use auto, {' or '.join(DTYPES)}")
    return DTYPES[wanted]


# The attention of each part of a config with vision. The vision tower attends to one whole image, without the pool.
ATTENTIONS = MappingProxyType({"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"})
# The modules that a vision model has in addition to the text model and its head.
VISION_MODULES = ("model.vision_tower.", "model.multi_modal_projector.")


def load_model(folder: Path, device: torch.device, wanted_dtype: str = "auto", *, images: bool = False) -> Any:
    """Load the model on `device` with attention through the pool. Raise StartupError.

    `wanted_dtype` is as in `pick_dtype`. With `images`, the vision tower is loaded too.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    attention = dict(ATTENTIONS) if images else ATTENTION_NAME
    model = read_model(kind, folder, device, wanted_dtype, attn_implementation=attention)
    _refuse_unsupported(model)
    quicken_head(model)
    return model.eval().requires_grad_(False)


def read_model(
    kind: Any, folder: Path, device: torch.device, wanted_dtype: str, *, spare: tuple[str, ...] = (), **options: Any
) -> Any:
    """Load a model with one of transformers' auto classes on `device`.

    Raise StartupError on failure, or if weights are missing whose names begin with no prefix in `spare`.
    """
    logging.disable_progress_bar()
    dtype = pick_dtype(wanted_dtype, device)
    try:
        model, info = kind.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
        model = model.to(device)
    except Exception as error:  # transformers raises anything from KeyError to a safetensors error
        raise StartupError(f"cannot load the model in {folder}: {_first_line(error)}") from error
    absent = sorted(key for key in info["missing_keys"] if not key.startswith(spare))
    if absent:
        raise StartupError(f"weights in {folder} lack {absent[0]} ({len(absent)} in all): copy the model again")
    return model


def block_shape(model: Any, block_size_tokens: int) -> BlockShape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return BlockShape(
        layers=config.num_hidden_layers,
        block_size=block_size_tokens,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
    )


def _refuse_unsupported(model: Any) -> None:
    """Raise StartupError for unsupported features that the config names. The warm-up step detects the others."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if not model.is_backend_compatible():
        raise StartupError(f"{name} has attention code of its own, which the torch engine cannot page: choose another")
    odd = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    if odd:
        raise StartupError(f"{name} has layers of type {odd[0]}; the torch engine serves full attention only")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in CONTEXT_DEPENDENT_ROPE:
        raise StartupError(f"{name} has rope_type {rope}, which depends on the batch; the torch engine cannot serve it")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# The row counts for which oneDNN is up to twice as fast over a large vocabulary as the BLAS behind torch's linear.
# oneDNN reads the weights once and in place. With fewer rows BLAS is as fast, and with more the product is bound by
# arithmetic.
ONEDNN_ROWS = range(4, 33)


class FewRowsHead(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer with the same weights that uses oneDNN for the row counts in `ONEDNN_ROWS`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # `hidden` is [..., features]. The result is [..., vocab].
        if hidden.shape[:-1].numel() in ONEDNN_ROWS:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")
            return result
        return functional.linear(hidden, self.weight, self.bias)


def quicken_head(model: torch.nn.Module) -> None:
    """Replace the output layer of a float32 model on a CPU. Do nothing on other devices or without oneDNN."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or not torch.backends.mkldnn.is_available():
        return
    if head.weight.device.type == "cpu" and head.weight.dtype == torch.float32:
        model.set_output_embeddings(FewRowsHead(head))
