"""LoRA adapters with random weights, and the tokens of transformers with an adapter merged into the model."""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 16
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write_adapter(folder: Path, model: Path, seed: int, **config: object) -> Path:
    """Write an adapter in PEFT's layout, strong enough to change answers. `config` overrides its configuration."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    weights = {}
    for name, layer in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if name.endswith(TARGETS):
            weights[f"{_PREFIX}{name}{_DOWN}"] = torch.randn(RANK, layer.in_features)
            weights[f"{_PREFIX}{name}{_UP}"] = torch.randn(layer.out_features, RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    modules = [target.rpartition(".")[2] for target in TARGETS]
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    return folder


def merged_tokens(model: Path, folder: Path | None, prompt: NDArray[np.int32], tokens: int) -> list[int]:
    """Return greedy tokens of transformers after `prompt` [n] 1D int32, with the adapter merged into the weights."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = load_file(folder / "adapter_model.safetensors") if folder is not None else {}
    for key in (key for key in weights if key.endswith(_DOWN)):
        layer = loaded.get_submodule(key.removeprefix(_PREFIX).removesuffix(_DOWN))
        layer.weight.data += weights[key.removesuffix(_DOWN) + _UP] @ weights[key] * (ALPHA / RANK)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
        out = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
