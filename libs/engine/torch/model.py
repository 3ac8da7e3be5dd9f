"""Loading of Hugging Face folders with transformers' model classes, without those that paged attention cannot
serve.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from libs.contracts.errors import StartupError
from libs.engine.torch.attention import ATTENTION_NAME, paged_attention
from libs.engine.torch.kv_pool import BlockShape

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
# Least compute capability of CUDA devices. Older ones emulate bfloat16, more slowly than they compute in float32.
BFLOAT16_CAPABILITY = (8, 0)
# Rotations that change with the longest sequence of a batch, so that stored keys would become stale.
CONTEXT_DEPENDENT_ROPE = ("dynamic", "longrope")


def pick_device(wanted: str) -> torch.device:
    """Return the device named by a setting such as "auto", "cpu" or "cuda:1". Raise StartupError."""
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
    """Return the type named by a setting. Raise StartupError for an unknown one.

    "auto" is bfloat16 on GPUs that compute in it, else float32.
    """
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
        return torch.bfloat16 if fast else torch.float32
    if wanted not in DTYPES:
        raise StartupError(f"dtype={wanted} is unknown: use auto, {' or '.join(DTYPES)}")
    return DTYPES[wanted]


def load_model(folder: Path, device: torch.device, wanted_dtype: str = "auto") -> Any:
    """Load the model on `device`, with attention through the pool. Raise StartupError. For the type see
    `pick_dtype`.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    logging.disable_progress_bar()
    dtype = pick_dtype(wanted_dtype, device)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True, output_loading_info=True
        )
        model = model.to(device)
    except Exception as error:  # transformers raises anything from KeyError to a safetensors error
        raise StartupError(f"cannot load the model in {folder}: {_first_line(error)}") from error
    absent = sorted(info["missing_keys"])
    if absent:
        raise StartupError(f"weights in {folder} lack {absent[0]} ({len(absent)} in all): copy the model again")
    _refuse_unsupported(model)
    quicken_head(model)
    return model.eval().requires_grad_(False)


def block_shape(model: Any, block_size_tokens: int) -> BlockShape:
    """Return the shape of a block of the model's KV."""
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
    """Raise StartupError for what the config shows to be unsupported. The warm-up step finds the rest."""
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


# Row counts at which oneDNN is up to twice as fast over a large vocabulary as the BLAS behind torch's linear. It
# reads the weights once, in place. With fewer rows BLAS is as fast; with more the product is bound by arithmetic.
ONEDNN_ROWS = range(4, 33)


class FewRowsHead(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer over the same weights, computed by oneDNN where that is faster."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # hidden [..., features]; returns [..., vocab]
        if hidden.shape[:-1].numel() in ONEDNN_ROWS:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")
            return result
        return functional.linear(hidden, self.weight, self.bias)


def quicken_head(model: torch.nn.Module) -> None:
    """Replace the output layer of a float32 model on a CPU if torch was built with oneDNN. Do nothing otherwise."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or not torch.backends.mkldnn.is_available():
        return
    if head.weight.device.type == "cpu" and head.weight.dtype == torch.float32:
        model.set_output_embeddings(FewRowsHead(head))
