"""Small language models with random weights, the same at each call."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SEED = 5


def write_random_llama(folder: Path, **shape: Any) -> Path:
    """A llama of two layers with a fresh vocabulary of 260 in `folder`; `shape` is what of its LlamaConfig differs."""
    usual = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 1024,
    }  # fmt: skip
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(LlamaConfig(**{**usual, **shape})).save_pretrained(folder)
    return folder
