"""Peaks of a device: of a GPU as published, of a CPU as measured."""

import time
from functools import cache
from typing import Any, Final

import torch

from libs.perfmodel.peaks import gpu_peaks

MEASURE_S: Final = 0.1
"""Bound on measuring each peak of a CPU, after one pass."""
SQUARE: Final = 1024
COPIED_BYTES: Final = 64 * 1024 * 1024
"""More than caches hold."""


def device_peaks(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s in the type, bytes/s of memory) with the threads that torch has now; zeros where unknown."""
    if device.type == "cuda":
        flops_per_s, bytes_per_s = gpu_peaks(torch.cuda.get_device_name(device))
        return (flops_per_s if dtype.itemsize == 2 else 0.0), bytes_per_s
    return _cpu_peaks(torch.get_num_threads()) if dtype == torch.float32 else (0.0, 0.0)


@cache
def _cpu_peaks(_threads: int) -> tuple[float, float]:
    """(FLOP/s, bytes/s) in float32 with so many threads: the best of a few large products and copies."""
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
