"""Tests without a GPU of the parts, grids and loads of `make bench-gpu`."""

import pytest

from libs.policy.step_time import StepWork
from load.engine import bench_phase
from load.engine.bench_phase import Call
from load.gpu import bench_gpu, engine_steps, kv_path, plain_steps, serve
from load.gpu.against_profile import against_profile, kind_of, profile_of

DEVICE = "cuda:1"


def test_every_part_gets_the_gpu_and_accepts_its_arguments() -> None:
    commands = {name: part.command(DEVICE, 100.0) for name, part in bench_gpu.PARTS.items()}
    for name, part in bench_gpu.PARTS.items():
        if part.takes_device:
            assert commands[name][commands[name].index("--device") + 1] == DEVICE
        if part.watches_time:
            assert commands[name][-2:] == ["--limit-s", "70"]
    parsers = {
        "phase": bench_phase.parser(),
        "plain_steps": plain_steps.parser(),
        "engine_steps": engine_steps.parser(),
        "vllm_steps": engine_steps.parser(),
        "vllm_kv_path": kv_path.parser(),
    }
    for name, parser in parsers.items():
        assert parser.parse_args(commands[name][1:]).device == DEVICE
    serve.parser().parse_args(commands["vllm_serve"][1:])


def test_parts_are_chosen_by_name_and_vllms_run_only_if_it_is_installed() -> None:
    everything = bench_gpu.chosen(None, has_vllm=True)
    assert list(everything) == list(bench_gpu.PARTS)
    assert set(everything) - set(bench_gpu.chosen(None, has_vllm=False)) == {
        name for name in everything if name.startswith("vllm")
    }
    assert list(bench_gpu.chosen(["vllm_steps", "phase"], has_vllm=False)) == ["phase", "vllm_steps"]


@pytest.mark.system
def test_a_part_that_takes_too_long_is_ended_and_its_output_preserved() -> None:
    said = "import time; print('{\"a\": 1}', flush=True); time.sleep(60)"
    part = bench_gpu.Part("timeit", ("-n1", "-r1", said), takes_device=False)
    late = bench_gpu.run("late", part, DEVICE, 3.0)
    assert (late.exit_code, late.figures) == (124, {"a": 1})
    missing = bench_gpu.run("missing", bench_gpu.Part("no_such_module", ()), DEVICE, 30.0)
    assert missing.exit_code == 1
    assert missing.figures is None and "no_such_module" in missing.tail[-1]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "llama3.1-8b-h200-aic"),
        ("NVIDIA H100 80GB HBM3", "llama3.1-8b-h100-aic"),
        ("NVIDIA A100-SXM4-80GB", "llama3.1-8b-a100-aic"),
        ("NVIDIA L40S", "llama3.1-8b-l40s-aic"),
        ("NVIDIA B200", "llama3.1-8b-b200-aic"),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_compared_with_its_own_profile(gpu: str, name: str | None) -> None:
    found = profile_of(gpu)
    assert (found and found.name) == name


def test_steps_are_compared_with_the_profile_for_the_same_work() -> None:
    profile = profile_of("NVIDIA H200")
    assert profile is not None
    alone = profile.step_time.step_ns(StepWork(512, 1, 512, prefill_squared_tokens=512 * 512)) / 1e6
    cells = [
        {"prompt": 512, "batch": 0, "context": 0, "ms": 2 * alone},
        {"prompt": 0, "batch": 4, "context": 256, "ms": 5.0},
        {"prompt": 128, "batch": 4, "context": 256, "ms": None},
    ]
    rows = against_profile("NVIDIA H200", {"plain_steps": {"cells": cells}, "phase": {"steps": cells}, "kv": None})
    assert [kind_of(row) for row in rows] == ["prefill", "decode"]
    assert rows[0]["ratio"] == pytest.approx(2, abs=0.001)
    assert against_profile("Tesla T4", {"plain_steps": {"cells": cells}}) == []


def test_several_prompts_of_a_step_are_not_compared_with_one_of_their_total_length() -> None:
    several = StepWork(8192, 8, 8192, prefill_squared_tokens=8 * 1024 * 1024)
    rows = engine_steps.medians([(several, 100_000_000), (several, 102_000_000)])
    found = against_profile("NVIDIA H200", {"engine_steps": {"steps": rows}})
    profile = profile_of("NVIDIA H200")
    assert profile is not None
    assert [each["predicted_ms"] for each in found] == [round(profile.step_time.step_ns(several) / 1e6, 3)]


def test_a_gpu_gets_a_load_of_gpu_size() -> None:
    assert bench_phase.shape_of("torch", DEVICE) == bench_phase.GPU_SHAPE
    assert bench_phase.shape_of("torch", "auto") == bench_phase.SHAPES["torch"]
    assert bench_phase.shape_of("sim", DEVICE) == bench_phase.SHAPES["sim"]


def test_busy_time_is_compared_with_the_gpus_own_clock() -> None:
    work = StepWork(decode_sequences=1, decode_kv_tokens=10)
    calls = [Call(work, 0, 500, 400), Call(work, 500, 900, 350)]
    assert bench_phase.gpu_figures(calls, 900, 1000) == {
        "gpu_busy_by_cuda_events": 0.75,
        "gpu_busy_error_points": 15.0,
    }
    unknown = [Call(work, 0, 500)]
    assert set(bench_phase.gpu_figures(unknown, 900, 1000).values()) == {None}


def test_figures_are_the_last_json_line_whatever_follows_it() -> None:
    assert bench_gpu.figures_of(["{1}", '{"a": 1}', '{"a": 2}', "torch: busy_error_points is 3"]) == {"a": 2}
    assert bench_gpu.figures_of(['{"a": 1}', '{"a"']) == {"a": 1}
    assert bench_gpu.figures_of(["", "done"]) is None
