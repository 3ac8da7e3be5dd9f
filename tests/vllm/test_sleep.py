"""Tests of a real EngineCore that sleeps on a CPU, where vLLM does everything but free the device."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity
from libs.engine.vllm.arguments import EXTENSION, sleep_arguments
from libs.engine.vllm.connectors import connector_of
from libs.engine.vllm.core import VllmCore
from libs.perfmodel.utilisation import KvGroup, KvShape
from libs.testing.engines.real_model import write_random_llama
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

MB = 1024 * 1024
IDENTITY = EngineIdentity("one", 1, "127.0.0.1:1")


async def test_an_engine_that_dies_asleep_does_not_wake_and_raises_an_error_with_a_message(tmp_path: Path) -> None:
    model = write_random_llama(tmp_path / "llama", hidden_size=128, eos_token_id=257)
    core = VllmCore()
    config = EngineConfig(model, "m", threads=1, block_size_tokens=32, kv_memory_mb=16, max_sequences=4)
    await core.start(config, IDENTITY, lambda _stage, _fraction: None)
    try:
        await core.sleep(keep_weights=True)
        for pid in core.pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: core._running.resources.engine_dead)
        with pytest.raises(StartupError, match="the vllm engine did not wake"):
            await core.wake()
    finally:
        await core.close()


def test_vllm_accepts_the_arguments_of_an_engine_that_can_sleep(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = sleep_arguments(EngineConfig(None, "m", vllm_sleeps=True, vllm_asleep_mb=8_000), 80 << 30)
    found = AsyncEngineArgs(model=str(tmp_path), **arguments)
    assert found.enable_sleep_mode and found.gpu_memory_utilization < 0.92


def test_a_configured_share_of_memory_leaves_sleeping_engines_their_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    from libs.engine.vllm import launch

    passed: dict[str, Any] = {}

    def recorded(**arguments: Any) -> SimpleNamespace:
        passed.update(arguments)
        built = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=False),
            model_config=SimpleNamespace(runner_type="generate"),
        )
        return SimpleNamespace(create_engine_config=lambda: built)

    monkeypatch.setattr(launch, "AsyncEngineArgs", recorded)
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda _self: True)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda _self: 80_000 * MB)
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(
        tmp_path, "m", block_size_tokens=32, vllm_sleeps=True, vllm_asleep_mb=8_000,
        vllm_connector="OffloadingConnector", vllm_connector_config={"spec_name": "CPUOffloadingSpec"},
        vllm_arguments={"gpu_memory_utilization": 0.9, "max_model_len": 256},
    )  # fmt: skip
    launch.configured(config, connector_of(config))
    assert passed["gpu_memory_utilization"] == pytest.approx(0.9 - 0.1)
    assert (passed["enable_sleep_mode"], passed["max_model_len"]) == (True, 256)


@pytest.mark.parametrize(
    ("method", "drops"), [(None, True), ("ngram", True), ("suffix", True), ("eagle3", False), ("draft_model", False)]
)
def test_weights_are_dropped_only_if_vllm_reads_all_of_them_again(
    tmp_path: Path, method: str | None, drops: bool
) -> None:
    from libs.engine.vllm import launch

    config = EngineConfig(write_random_llama(tmp_path), "m", block_size_tokens=32, vllm_arguments={"max_model_len": 64})
    found: Any = launch.configured(config, connector_of(config))
    found.model_config.enable_sleep_mode, found.parallel_config.worker_extension_cls = True, EXTENSION
    found.cache_config.num_gpu_blocks = 2
    found.speculative_config = SimpleNamespace(method=method) if method else None
    can = launch._capabilities(config, found, "", None, KvShape((KvGroup(32, 1),)), kv_once=True)
    assert (can.sleeps, can.drops_weights) == (True, drops)
