"""What `make bench-gpu` runs, and the grids and loads it does that with: judged here without a GPU."""

from dataclasses import replace

import pytest

from libs.engine.port import Capabilities
from libs.perfmodel.learner import StepKind
from libs.policy.step_time import StepWork
from load.engine import bench_phase, bench_steps, bench_tune, gpu_engine
from load.engine.clocked import Call
from load.engine.step_grid import CPU_SIZES, GPU_SIZES, Cell, batch_of, folds, grid

SMOLLM_KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
ROOMY = Capabilities(
    max_context_tokens=8192,
    max_sequences=512,
    kv_blocks=(bench_steps.GPU_KV_MEMORY_MB << 20) // (16 * SMOLLM_KV_TOKEN_BYTES),
    kv_block_bytes=16 * SMOLLM_KV_TOKEN_BYTES,
    block_size_tokens=16,
    kv_layout="test",
)
DEVICE = "cuda:1"


@pytest.mark.parametrize("device", ["cpu", "cuda:NVIDIA H200"])
def test_every_step_of_a_grid_is_measured_in_its_parts_too_and_fits(device: str) -> None:
    cells = grid(device, ROOMY)
    sizes = GPU_SIZES if device != "cpu" else CPU_SIZES
    assert len(cells) == len(sizes.chunks) + len(sizes.decodes) + len(sizes.mixed_chunks) * len(sizes.mixed_decodes)
    mixed = [cell for cell in cells if cell.kind is StepKind.MIXED]
    assert all(Cell(cell.chunk, None) in cells and Cell(None, cell.decode) in cells for cell in mixed)
    assert sorted(repr(cell) for part in folds(cells) for cell in part) == sorted(map(repr, cells))


def test_a_gpus_grid_goes_as_far_as_gpus_are_used() -> None:
    cells = grid("cuda:NVIDIA H200", ROOMY)
    assert max(cell.work.prefill_tokens for cell in cells) == 8192
    assert max(cell.work.decode_sequences for cell in cells) == 256
    assert max(cell.work.decode_kv_tokens for cell in cells) == 256 * 4096
    assert any(cell.chunk == (8192, 0) and cell.decode == (256, 256) for cell in cells)


@pytest.mark.parametrize(("blocks", "context"), [(40, 8192), (2000, 8192), (60_000, 2048)])
def test_of_a_grid_only_steps_are_left_that_an_engine_has_room_for(blocks: int, context: int) -> None:
    small = replace(ROOMY, kv_blocks=blocks, max_context_tokens=context)
    cells = grid("cuda:NVIDIA H200", small)
    assert 0 < len(cells) < len(grid("cuda:NVIDIA H200", ROOMY))
    for cell in cells:
        for chunk in batch_of(cell, small).chunks:
            assert max(chunk.block_table) < blocks
            assert len(chunk.history) <= context


def test_every_part_is_given_the_gpu_and_its_arguments_are_taken() -> None:
    commands = gpu_engine.commands(DEVICE)
    assert {"bench_steps", "bench_tune", "bench_phase"} <= set(commands)
    assert all(command[command.index("--device") + 1] == DEVICE for command in commands.values())
    parsers = {
        "bench_steps": bench_steps.parser(),
        "bench_tune": bench_tune.parser(),
        "bench_phase": bench_phase.parser(),
    }
    for name, parser in parsers.items():
        assert parser.parse_args(commands[name][1:]).device == DEVICE


def test_a_gpu_gets_the_load_and_memory_of_a_gpu() -> None:
    sim, torch = bench_tune.CASES
    assert (
        bench_tune.case_on(torch, DEVICE).median_tokens
        > torch.median_tokens
        == bench_tune.case_on(torch, "cpu").median_tokens
    )
    assert bench_tune.case_on(sim, DEVICE) == sim and bench_tune.worker_env(sim, DEVICE) == {}
    assert bench_tune.worker_env(torch, DEVICE)["FULCRUM_WORKER_DEVICE"] == DEVICE
    assert bench_phase.shape_of("torch", DEVICE) == bench_phase.GPU_SHAPE
    assert bench_phase.shape_of("torch", "auto") == bench_phase.SHAPES["torch"]
    assert bench_phase.shape_of("sim", DEVICE) == bench_phase.SHAPES["sim"]
    for device, memory_mb in ((DEVICE, bench_steps.GPU_KV_MEMORY_MB), ("auto", bench_steps.CPU_KV_MEMORY_MB)):
        assert bench_steps.kv_memory_mb(bench_steps.parser().parse_args(["--device", device])) == memory_mb
    assert bench_steps.kv_memory_mb(bench_steps.parser().parse_args(["--kv-memory-mb", "77"])) == 77


def test_busy_time_is_held_to_the_gpus_own_clock() -> None:
    work = StepWork(decode_sequences=1, decode_kv_tokens=10)
    calls = [Call(work, 0, 500, 400), Call(work, 500, 900, 350)]
    assert bench_phase.gpu_figures(calls, 900, 1000) == {
        "gpu_busy_by_cuda_events": 0.75,
        "gpu_busy_error_points": 15.0,
    }
    unknown = [Call(work, 0, 500)]
    assert set(bench_phase.gpu_figures(unknown, 900, 1000).values()) == {None}


def test_figures_are_the_last_json_line_whatever_follows_it() -> None:
    assert gpu_engine.figures_of(["{1}", '{"a": 1}', '{"a": 2}', "torch: busy_error_points is 3"]) == {"a": 2}
    assert gpu_engine.figures_of(['{"a": 1}', '{"a"']) == {"a": 1}
    assert gpu_engine.figures_of(["", "done"]) is None
