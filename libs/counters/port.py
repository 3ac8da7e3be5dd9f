"""Hardware counters of the GPUs of a host, as their driver tells them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; None is what it does not tell."""

    uuid: str
    index: int
    name: str
    utilisation: float | None = None
    """Share of the driver's last sampling period in which any kernel ran, 0..1."""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    tensor_active: float | None = None
    """Share of time since the last reading in which tensor cores worked, 0..1; Hopper and later."""
    dram_active: float | None = None
    """Share of the memory's bandwidth used since the last reading, 0..1; Hopper and later."""


class GpuCounters(Protocol):
    """Reads all GPUs of this host."""

    def read(self) -> Sequence[GpuReading]:
        """One reading of each GPU; blocks for milliseconds. A GPU that fails to answer is left out."""
        ...

    def close(self) -> None:
        """Let go of the driver. Idempotent."""
        ...
