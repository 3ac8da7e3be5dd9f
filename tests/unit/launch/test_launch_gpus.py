"""Tests of how `fulcrum up` distributes the GPUs of a machine among workers."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from libs.contracts.errors import StartupError
from libs.launch.options import SuiteOptions
from libs.launch.plan import deal, make_plan, visible_gpus
from libs.worker.settings import WorkerSettings
from tests.unit.launch.test_launch_plan import MODEL, PLACE

SHARED = {"gpu_memory_utilization": 0.4}


def devices(gpus: int, workers: int, engine: str = "vllm", device: str = "auto", **arguments: Any) -> list[str]:
    dealt = deal([str(gpu) for gpu in range(gpus)], workers, engine=engine, device=device, arguments=arguments)
    return [settings.get("CUDA_VISIBLE_DEVICES", "") for settings in dealt]


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 4))
def test_workers_have_separate_gpus_if_there_are_enough(gpus: int, workers: int, width: int) -> None:
    if gpus < workers * width:
        with pytest.raises(StartupError):
            devices(gpus, workers, tensor_parallel_size=width)
        return
    named = [name.split(",") for name in devices(gpus, workers, tensor_parallel_size=width)]
    assert all(len(group) == width for group in named)
    assert len({gpu for group in named for gpu in group}) == workers * width


def test_workers_share_too_few_gpus_if_their_memory_is_bounded() -> None:
    assert devices(1, 2, **SHARED) == ["0", "0"]
    assert devices(2, 3, engine="torch") == ["0", "1", "0"]
    with pytest.raises(StartupError, match=r"there are 2: ask for fewer.*gpu_memory_utilization"):
        devices(2, 3)
    with pytest.raises(StartupError, match="computes on 4 GPUs, there are 2"):
        devices(2, 1, tensor_parallel_size=4, **SHARED)


def test_workers_that_need_no_gpu_or_name_their_own_get_none() -> None:
    assert devices(2, 2, engine="sim") == devices(2, 2, device="cpu") == devices(2, 2, device="cuda:1") == ["", ""]
    assert devices(0, 2) == ["", ""]


def test_only_gpus_visible_in_the_environment_are_used() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ("2", "3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


def test_each_worker_of_a_suite_sees_only_its_gpus() -> None:
    options = SuiteOptions(engine="vllm", prefill=1, decode=1, mixed=1)
    workers = make_plan(options, MODEL, replace(PLACE, gpus=("4", "5", "6"))).workers
    assert [(spec.name, spec.env["CUDA_VISIBLE_DEVICES"]) for spec in workers] == [
        ("gpu-0", "4"), ("gpu-1", "5"), ("gpu-2", "6"),
    ]  # fmt: skip


def test_a_worker_counts_as_many_gpus_as_its_engine_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_WORKER_MODEL_PATH", "/models/x")
    monkeypatch.setenv("FULCRUM_WORKER_ENGINE", "vllm")
    assert WorkerSettings().gpus == 1
    arguments = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    monkeypatch.setenv("FULCRUM_WORKER_VLLM_ARGUMENTS", json.dumps(arguments))
    assert WorkerSettings().gpus == 8
    monkeypatch.setenv("FULCRUM_WORKER_GPUS", "4")
    with pytest.raises(ValidationError, match=r"FULCRUM_WORKER_GPUS is 4, .* computes on 8"):
        WorkerSettings()
