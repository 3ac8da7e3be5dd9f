"""Hardware counters of a host's GPUs: the port, NVIDIA's NVML, and the sampler, of which one per host is active."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import structlog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The counters of one GPU at one moment; None marks those that it does not report."""

    uuid: str
    index: int
    name: str
    utilisation: float | None = None
    """The share of the driver's last sampling period in which any kernel ran, 0..1."""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    tensor_active: float | None = None
    """The share of time since the last reading in which tensor cores worked, 0..1; Hopper and later."""
    dram_active: float | None = None
    """The share of the memory's bandwidth used since the last reading, 0..1; Hopper and later."""


class GpuCounters(Protocol):
    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU, blocking for milliseconds. A GPU that fails to respond is left out."""
        ...

    def close(self) -> None:
        """Release the driver and its samples. Idempotent."""
        ...


T = TypeVar("T")
MILLI: Final = 1e-3
PERCENT: Final = 1e-2


def open_nvml() -> "NvmlCounters | None":
    """Open the counters; return None if the package, the driver's library or any GPU is missing."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    counters = NvmlCounters(library)
    if counters.gpus:
        return counters
    counters.close()
    return None


class NvmlCounters:
    """The GpuCounters port over an initialised `library`, the module pynvml."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._closed = False
        count = self._query(library.nvmlDeviceGetCount) or 0
        found = (self._query(library.nvmlDeviceGetHandleByIndex, index) for index in range(count))
        self.gpus = [_Gpu(index, device) for index, device in enumerate(found) if device is not None]
        self._gpm: dict[int, list[Any]] = {gpu.index: [] for gpu in self.gpus if self._has_gpm(gpu)}
        """The previous sample of each GPU with GPM, to which the next one is compared."""

    def read(self) -> Sequence[GpuReading]:
        readings = (self._read(gpu) for gpu in self.gpus)
        return [reading for reading in readings if reading is not None]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for sample in (sample for samples in self._gpm.values() for sample in samples):
            self._query(self._library.nvmlGpmSampleFree, sample)
        self._query(self._library.nvmlShutdown)

    def _read(self, gpu: "_Gpu") -> GpuReading | None:
        nvml = self._library
        uuid, name = self._query(nvml.nvmlDeviceGetUUID, gpu.device), self._query(nvml.nvmlDeviceGetName, gpu.device)
        if not uuid:
            return None
        rates = self._query(nvml.nvmlDeviceGetUtilizationRates, gpu.device)
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, gpu.device)
        power_mw = self._query(nvml.nvmlDeviceGetPowerUsage, gpu.device)
        tensor, dram = self._activity(gpu)
        return GpuReading(
            uuid=uuid,
            index=gpu.index,
            name=name or "",
            utilisation=rates.gpu * PERCENT if rates else None,
            memory_used_bytes=memory.used if memory else None,
            memory_bytes=memory.total if memory else None,
            power_w=None if power_mw is None else power_mw * MILLI,
            tensor_active=tensor,
            dram_active=dram,
        )

    def _has_gpm(self, gpu: "_Gpu") -> bool:
        support = self._query(self._library.nvmlGpmQueryDeviceSupport, gpu.device)
        return bool(support and support.isSupportedDevice)

    def _activity(self, gpu: "_Gpu") -> tuple[float | None, float | None]:
        """Return the activity of (tensor cores, DRAM) since the last call, which is unknown on the first one."""
        nvml, samples = self._library, self._gpm.get(gpu.index)
        if samples is None:
            return None, None
        sample = self._query(nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return None, None
        if self._query(nvml.nvmlGpmSampleGet, gpu.device, sample) is None:
            self._query(nvml.nvmlGpmSampleFree, sample)
            return None, None
        samples.append(sample)
        if len(samples) < 2:
            return None, None
        before = samples.pop(0)
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = 2
        query.sample1, query.sample2 = before, sample
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        query.metrics[1].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        reported = self._query(nvml.nvmlGpmMetricsGet, query)
        self._query(nvml.nvmlGpmSampleFree, before)
        if reported is None:
            return None, None
        tensor, dram = (reported.metrics[place] for place in range(2))
        return _share(tensor), _share(dram)

    def _query(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call the library; return None if this GPU or driver does not support it or cannot report it now."""
        try:
            return function(*arguments)
        except self._library.NVMLError:
            return None


def _share(metric: Any) -> float | None:
    return None if metric.nvmlReturn else float(metric.value) * PERCENT


class _Gpu:
    """The index and NVML handle of one GPU."""

    def __init__(self, index: int, device: Any) -> None:
        self.index = index
        self.device = device


PERIOD_S: Final = 1.0
LOCK_NAME: Final = "fulcrum-gpu-counters.lock"


class GpuSampler:
    """A sampler that reads the counters every second while it holds the lock.

    The kernel frees the lock of a process that dies, and another worker takes over. Workers that do not share the
    folder (containers) all sample, which readers can tell by the GPU's own id.
    """

    def __init__(
        self, open_counters: Callable[[], GpuCounters | None], folder: Path, *, period_s: float = PERIOD_S
    ) -> None:
        self._period_s = period_s
        self._open_counters = open_counters
        self._path = folder / LOCK_NAME
        self._fresh: Sequence[GpuReading] = ()

    @property
    def fresh(self) -> bool:
        """Return whether there are readings that have not been taken."""
        return bool(self._fresh)

    def take(self) -> Sequence[GpuReading]:
        """Return and clear the readings that have not been taken."""
        fresh, self._fresh = self._fresh, ()
        return fresh

    async def run(self) -> None:
        """Sample until cancelled; return at once if the host has no counters."""
        counters = await asyncio.to_thread(self._open_counters)
        if counters is None:
            return
        try:
            with contextlib.ExitStack() as stack:
                held = False
                while True:
                    held = held or self._lock(stack)
                    if held:
                        self._fresh = await asyncio.to_thread(counters.read)
                    await asyncio.sleep(self._period_s)
        finally:
            counters.close()

    def _lock(self, stack: contextlib.ExitStack) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            log.warning("no lock for GPU counters", error=str(error))
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        stack.callback(os.close, descriptor)
        log.info("sampling the GPUs of this host")
        return True
