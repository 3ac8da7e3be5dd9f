"""Tests of the choice between generation and embeddings from a model's folder and arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import Pooling
from libs.engine.vllm.arguments import pooling_arguments, pooling_of

CONFIG = {"max_position_embeddings": 4096, "vocab_size": 1000, "eos_token_id": 7, "hidden_size": 8}


def config_of(folder: Path, mode: str = "", **arguments: Any) -> EngineConfig:
    """Return the configuration of a model whose files of Sentence Transformers, if any, name this mode."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    if mode:
        modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    return EngineConfig(folder, "m", vllm_arguments=arguments)


@pytest.mark.parametrize(
    ("mode", "arguments", "pooling"),
    [
        ("", {}, None),
        ("", {"runner": "auto"}, None),
        ("", {"runner": "pooling"}, Pooling.LAST),
        ("lasttoken", {}, Pooling.LAST),
        ("mean_tokens", {"runner": "pooling"}, Pooling.MEAN),
        ("mean_tokens", {"runner": "generate"}, None),
    ],
)
def test_a_folder_or_the_argument_runner_selects_embeddings(
    tmp_path: Path, mode: str, arguments: dict[str, Any], pooling: Pooling | None
) -> None:
    assert pooling_of(config_of(tmp_path, mode, **arguments)) is pooling


def test_an_unsupported_pooling_is_refused_by_name_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="pooling_mode_cls"):
        pooling_of(config_of(tmp_path, "cls"))


@pytest.mark.parametrize(("arguments", "tokens"), [({}, 4096), ({"max_model_len": 256}, 2048)])
def test_a_mean_has_room_for_the_longest_prompt_in_one_step(
    tmp_path: Path, arguments: dict[str, Any], tokens: int
) -> None:
    found = pooling_arguments(Pooling.MEAN, config_of(tmp_path, **arguments), step_tokens=2048)
    assert (found["max_num_batched_tokens"], found["enable_chunked_prefill"]) == (tokens, False)
    assert "max_num_batched_tokens" not in pooling_arguments(Pooling.LAST, config_of(tmp_path), step_tokens=2048)
