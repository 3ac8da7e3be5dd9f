"""Tests of GPU counters: missing ones stay missing, one process per host samples them, and they reach `/v1/occupancy`.

No GPU is needed: `RecordedNvml` answers as NVML's documentation says an H100 and an A10 do.
"""

# ruff: noqa: N802 - the names are NVML's

import asyncio
from ctypes import Structure, c_double, c_uint
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GpuReading as GpuReadingMessage
from libs.counters import GpuReading, GpuSampler, NvmlCounters, open_nvml
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.nodes import FRESH_NS
from libs.telemetry.rollups import RollUps
from libs.telemetry.workers import Members
from libs.testing.wait import until
from libs.testing.workers.telemetry import MS, at, step_batch
from services.metrics.accounting.occupancy import cluster_occupancy

H100, A10, LOST = "h100", "a10", "lost"


class NvmlError(Exception):
    """An error of NVML's own."""


class Metric(Structure):
    """A metric of GPM."""

    _fields_ = (("metricId", c_uint), ("nvmlReturn", c_uint), ("value", c_double))


@dataclass
class RecordedNvml:
    """The part of pynvml that is used, over three GPUs: one with GPM, one without, one that has fallen off the bus."""

    gpus: tuple[str, ...] = (H100, A10, LOST)
    samples: int = 0
    shut: int = 0

    NVMLError = NvmlError
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, device: str) -> str:
        if device == LOST:
            raise NvmlError("GPU is lost")
        return f"GPU-{device}"

    def nvmlDeviceGetName(self, device: str) -> str:
        return f"NVIDIA {device.upper()}"

    def nvmlDeviceGetUtilizationRates(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(total=80_000, used=20_000, free=60_000)

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        if device == A10:
            raise NvmlError("not supported")
        return 412_500

    def nvmlGpmQueryDeviceSupport(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(device == H100))

    def nvmlGpmSampleAlloc(self) -> str:
        self.samples += 1
        return f"sample {self.samples}"

    def nvmlGpmSampleGet(self, device: str, sample: str) -> str:
        return sample

    def nvmlGpmSampleFree(self, sample: str) -> None:
        self.samples -= 1

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=(Metric * 2)())

    def nvmlGpmMetricsGet(self, requested: SimpleNamespace) -> SimpleNamespace:
        assert requested.sample1 != requested.sample2 and requested.numMetrics == 2
        for metric, value in zip(requested.metrics, (31.5, 62.0), strict=True):
            assert metric.metricId in (5, 10)
            metric.value = value
        return requested

    def nvmlShutdown(self) -> None:
        self.shut += 1


def test_counters_are_shares_and_a_missing_counter_is_none() -> None:
    library = RecordedNvml()
    counters = NvmlCounters(library)
    h100, a10 = counters.read()
    assert h100 == GpuReading("GPU-h100", 0, "NVIDIA H100", 0.87, 20_000, 80_000, 412.5)
    assert (a10.power_w, a10.tensor_active, a10.dram_active) == (None, None, None)
    h100, a10 = counters.read()
    assert (h100.tensor_active, h100.dram_active) == (pytest.approx(0.315), pytest.approx(0.62))
    assert a10.tensor_active is None
    assert library.samples == 1
    counters.close()
    counters.close()
    assert (library.samples, library.shut) == (0, 1)


def test_without_a_driver_there_are_no_counters() -> None:
    counters = open_nvml()
    if counters is None:
        return
    readings = counters.read()  # on a machine that has GPUs
    counters.close()
    assert all(reading.uuid for reading in readings)


async def test_one_process_per_host_samples_and_another_takes_over(tmp_path: Path) -> None:
    first, second = (GpuSampler(lambda: NvmlCounters(RecordedNvml()), tmp_path, period_s=0.01) for _ in range(2))
    running = asyncio.ensure_future(first.run())
    await until(lambda: bool(first.take()))
    standing_by = asyncio.ensure_future(second.run())
    await until(lambda: bool(first.take()))
    assert not second.take()
    running.cancel()
    await until(lambda: bool(second.take()))
    standing_by.cancel()
    await asyncio.gather(running, standing_by, return_exceptions=True)


async def test_a_host_without_gpus_samples_nothing(tmp_path: Path) -> None:
    sampler = GpuSampler(lambda: None, tmp_path)
    await sampler.run()
    assert not sampler.take() and not list(tmp_path.iterdir())


def test_readings_reach_occupancy_while_they_are_recent() -> None:
    fleet, batch = FleetTelemetry(prefill_shares), step_batch(1, (0, 1000))
    batch.gpu_readings.append(GpuReadingMessage(uuid="GPU-a", index=0, name="NVIDIA A10", utilisation=0.0))
    batch.gpu_readings.append(GpuReadingMessage(uuid="GPU-b", index=1, power_w=float("nan")))
    fleet.add(batch, at(1000))
    fleet.add(step_batch(1, (0, 1000), worker="other"), at(1000))
    (gpu,) = cluster_occupancy(fleet, RollUps(), Members(), at(1000), 1000 * MS).hardware
    assert (gpu.node, gpu.uuid, gpu.utilisation) == ("node-a", "GPU-a", 0)
    assert (gpu.memory_bytes, gpu.power_w, gpu.tensor_active) == (None, None, None)
    assert cluster_occupancy(fleet, RollUps(), Members(), at(1000) + FRESH_NS, 1000 * MS).hardware == []
    assert cluster_occupancy(fleet, RollUps(), Members(), at(1000) - FRESH_NS, 1000 * MS).hardware == []


@pytest.mark.parametrize("end_ms", [1000, 10_999, 11_000, 59_000])
def test_readings_are_those_at_the_requested_end_whatever_the_window_length(end_ms: int) -> None:
    fleet, batch = FleetTelemetry(prefill_shares), step_batch(1, (end_ms - 1000, end_ms))
    batch.gpu_readings.append(GpuReadingMessage(uuid="GPU-a", index=0, name="NVIDIA A10"))
    fleet.add(batch, at(end_ms))
    assert len(cluster_occupancy(fleet, RollUps(), Members(), at(end_ms), 24 * 3600 * 1000 * MS).hardware) == 1
