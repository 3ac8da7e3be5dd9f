"""Models with random weights in the shapes of real ones, for GPU machines without weights and network.

vLLM's arguments for these models are here too.
"""

import argparse
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from libs.testing.engines.real_model import write_random_llama

LLAMA_8B: Final = "llama-3.1-8b"
SMOLLM2_135M: Final = "smollm2-135m"
# LlamaConfig by name, from the config.json of meta-llama/Llama-3.1-8B and HuggingFaceTB/SmolLM2-135M.
SHAPES: Final = MappingProxyType(
    {
        LLAMA_8B: {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
        },
        SMOLLM2_135M: {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    }
)

ENDS: Final = MappingProxyType({"bos_token_id": 1, "eos_token_id": 2})


def write_model(folder: Path, shape: str, device: str, tokenizer: Path | None = None, **changes: Any) -> Path:
    """Write a model of `shape` with random bfloat16 weights drawn on `device`, and return its folder.

    Tokenizer files are copied from the folder `tokenizer`. `changes` override values of the shape.
    """
    config = {**SHAPES[shape], **ENDS, **changes}
    write_random_llama(folder, device=device, dtype=torch.bfloat16, **config)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    return folder


def write_shape(folder: Path, shape: str, tokenizer: Path) -> Path:
    """Write a model of `shape` with the tokenizer of a folder, for vLLM's loader "dummy", which reads no weights."""
    config = LlamaConfig(**SHAPES[shape], **ENDS, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)
    config.save_pretrained(folder)
    # Fulcrum identifies a model by its files of weights, and refuses a folder without one.
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    copy_tokenizer(tokenizer, folder)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    for file in source.glob("*token*"):
        shutil.copy(file, folder / file.name)


def add_model_options(parser: argparse.ArgumentParser, *more_engines: str) -> None:
    """Add the options for the engine, the model, and the folder of random weights."""
    parser.add_argument("--engine", choices=("torch", "vllm", *more_engines), default="torch")
    parser.add_argument("--shape", choices=list(SHAPES), default=LLAMA_8B)
    parser.add_argument("--model", type=Path, help="a folder with weights in place of random ones")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where random weights are written")


def vllm_arguments(*, context_tokens: int, gpu_share: float, kv_mb: int) -> dict[str, Any]:
    """Return vLLM's engine arguments. `gpu_share` is a fraction of the GPU's memory, 0..1.

    vLLM's compiler is off, since its first start takes minutes. Decodes run as CUDA graphs.
    """
    return {
        "max_model_len": context_tokens,
        "gpu_memory_utilization": gpu_share,
        "kv_cache_memory_bytes": kv_mb << 20,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
