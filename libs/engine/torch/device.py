"""A device's name and its peak rates, measured on a CPU and taken from data sheets for a GPU."""

import platform
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from libs.engine.torch.attention import BlockShape
from libs.perfmodel.utilisation import Compute, gpu_peaks
from libs.runtime.release import release

# The time limit for measuring each peak of a CPU, after one pass.
MEASURE_S: Final = 0.1
SQUARE: Final = 1024
# Larger than any cache, so that the copy measures memory.
COPIED_BYTES: Final = 64 * 1024 * 1024


def device_name(device: torch.device) -> str:
    """Return "cpu", or "cuda:" followed by the GPU's name."""
    return f"cuda:{torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device.type)


def variant_of(model: Any, device: torch.device) -> str:
    """Return a text with everything except model and device that affects step times, as in the port's Capabilities."""
    parts = [str(model.dtype).removeprefix("torch."), f"torch {torch.__version__}", f"fulcrum {release()}"]
    if device.type == "cpu":
        parts += [f"{torch.get_num_threads()} threads", cpu_name()]
    return ", ".join(parts)


def device_peaks(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return (FLOP/s in `dtype`, memory bytes/s) with torch's current number of threads; zeros if unknown."""
    if device.type == "cuda":
        flops_per_s, bytes_per_s = gpu_peaks(torch.cuda.get_device_name(device))
        return (flops_per_s if dtype.itemsize == 2 else 0.0), bytes_per_s
    return _cpu_peaks(torch.get_num_threads()) if dtype == torch.float32 else (0.0, 0.0)


@cache
def _cpu_peaks(_threads: int) -> tuple[float, float]:
    """Measure (FLOP/s, bytes/s) in float32 by the fastest of repeated large products and copies.

    The argument is only the key of the cache. torch already uses this number of threads.
    """
    square = torch.ones(SQUARE, SQUARE)
    source, target = (torch.ones(COPIED_BYTES // 4) for _ in range(2))
    product_s = _best_s(lambda: torch.mm(square, square))
    copy_s = _best_s(lambda: target.copy_(source))
    return 2 * SQUARE**3 / product_s, 2 * COPIED_BYTES / copy_s


def _best_s(work: Any) -> float:
    work()
    best, end_s = float("inf"), time.perf_counter() + MEASURE_S
    while (start_s := time.perf_counter()) < end_s:
        work()
        best = min(best, time.perf_counter() - start_s)
    return best


EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def compute_of(model: Any, shape: BlockShape, device: torch.device) -> Compute | None:
    """Return the compute figures of a dense model; None for a mixture of experts, where a token uses few of the
    parameters.
    """
    config = model.config.get_text_config()
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
        return None
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    apart = {id(table.weight), id(head.weight)}
    text = model.get_decoder()
    layers = sum(each.numel() for each in text.parameters() if each.dim() > 1 and id(each) not in apart)
    flops_per_s, bytes_per_s = device_peaks(device, model.dtype)
    return Compute(
        layer_parameters=layers,
        head_parameters=head.weight.numel(),
        parameter_bytes=model.dtype.itemsize,
        attention_width=shape.layers * config.num_attention_heads * shape.head_dim,
        kv_token_bytes=shape.block_bytes // shape.block_size,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=bytes_per_s,
    )


CPU_INFO = Path("/proc/cpuinfo")


def cpu_name(info: Path = CPU_INFO) -> str:
    """Return the CPU's name as Linux reports it, or else its architecture."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, "").split()) or platform.machine()
