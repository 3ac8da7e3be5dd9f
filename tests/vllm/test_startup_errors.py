"""Tests of the one-line error when a vLLM engine cannot start."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity
from libs.engine.vllm import starting
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.engine.vllm.starting import PLUGINS_VARIABLE
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import DirectFetcher
from libs.testing.engines.real_model import real_model_folder

pytestmark = pytest.mark.vllm

HANGING = "libs.testing.engines.hanging_worker.HangingWorker"


@pytest.fixture(scope="module")
def model() -> Path:
    return real_model_folder()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_path": Path("/nowhere")}, "model folder /nowhere does not exist"),
        ({"vllm_connector": "Pigeon"}, "no KV connector 'Pigeon'"),
        ({"vllm_connector": "LMCacheConnectorV1"}, "needs the Python package 'lmcache'"),
        ({"block_size_tokens": 16}, "FULCRUM_WORKER_BLOCK_SIZE_TOKENS"),
        ({"vllm_arguments": {"colour": "red"}}, "colour"),
        ({"vllm_arguments": {"data_parallel_size": 2}}, "a worker for each"),
        ({"vllm_arguments": {"max_num_seqs": 4}}, "set FULCRUM_WORKER_MAX_SEQUENCES"),
        ({"device": "cuda"}, "finds no GPU here"),
        ({"kv_memory_mb": 16}, "KV cache"),
    ],
)
async def test_an_engine_that_cannot_start_gives_the_reason_in_one_line(
    model: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reason in await refused(model, **changes)


async def test_an_engine_whose_processes_would_outlive_it_does_not_serve(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, "another")
    assert "name 'fulcrum' in it too" in await refused(model)
    monkeypatch.setattr(starting, "PLUGIN", "another")  # as if it had not been looked at
    assert "outlive this worker" in await refused(model)


async def refused(model: Path, **changes: Any) -> str:
    """Return the one-line error of an engine that does not start."""
    config = replace(EngineConfig(model, "real", threads=1, block_size_tokens=32), **changes)
    engine = VllmEngine(config, SystemClock(), VllmCore())
    with pytest.raises(StartupError) as caught:
        await engine.start(EngineIdentity("one", 1, "127.0.0.1:1"), DirectFetcher(), lambda _stage, _fraction: None)
    await engine.close()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


async def test_a_start_that_hangs_is_ended_with_its_processes_and_reported(model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    reason = await refused(model, vllm_start_limit_s=40.0, vllm_arguments={"worker_cls": HANGING})
    assert "not started within 40 s" in reason and "FULCRUM_WORKER_VLLM_START_LIMIT_S" in reason
    left = {each for each in psutil.Process().children(recursive=True) if each not in before and is_vllms(each)}
    assert not left


def is_vllms(process: psutil.Process) -> bool:
    """Return whether it is alive and not Python's own helper."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    return False
