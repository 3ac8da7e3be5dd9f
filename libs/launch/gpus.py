"""The assignment of this machine's GPUs to the workers of `fulcrum up`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.counters import open_nvml
from libs.engine.config import parallel_of

DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
SHARE_ARGUMENT: Final = "gpu_memory_utilization"


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; none without NVIDIA's driver."""
    if (named := environ.get(DEVICES_VARIABLE)) is not None:
        return tuple(name for part in named.split(",") if (name := part.strip()) and name != "-1")
    counters = open_nvml()
    if counters is None:
        return ()
    try:
        return tuple(str(gpu.index) for gpu in counters.gpus)
    finally:
        counters.close()


def deal(
    gpus: Sequence[str], workers: int, *, engine: str, device: str, arguments: Mapping[str, Any]
) -> list[Mapping[str, str]]:
    """Return the settings by which each of `workers` sees only its own GPUs; empty if there are none. Pure.

    Workers share GPUs if there are too few. Torch's take the memory in their settings, vLLM's an equal part unless
    `gpu_memory_utilization` is among its `arguments`. Raises StartupError if they do not fit.
    """
    if engine == "sim" or not gpus or device not in ("auto", "cuda"):
        return [{}] * workers
    width = _width(arguments) if engine == "vllm" else 1
    groups = [gpus[start : start + width] for start in range(0, len(gpus) - width + 1, width)]
    if not groups:
        raise StartupError(
            f"a worker computes on {width} GPUs, there are {len(gpus)}: see FULCRUM_WORKER_VLLM_ARGUMENTS"
        )
    if engine == "vllm" and len(groups) < workers and SHARE_ARGUMENT not in arguments:
        raise StartupError(
            f"{workers} workers of {width} need {workers * width} GPUs, there are {len(gpus)}: ask for fewer, e.g."
            f" --prefill 0 --decode 0 --mixed 1, let them share by {SHARE_ARGUMENT} in FULCRUM_WORKER_VLLM_ARGUMENTS,"
            " or set FULCRUM_WORKER_DEVICE=cpu for vLLM's build for CPUs"
        )
    return [{DEVICES_VARIABLE: ",".join(groups[number % len(groups)])} for number in range(workers)]


def _width(arguments: Mapping[str, Any]) -> int:
    try:
        found = parallel_of(arguments)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if found.nodes > 1 or found.data > 1:
        raise StartupError(
            "`fulcrum up` starts workers of one node and one data-parallel rank, all with the same"
            " FULCRUM_WORKER_VLLM_ARGUMENTS: start others by themselves (docs/deploy.md)"
        )
    return found.gpus
