"""The port to hardware counters of a host's GPUs, as reported by their driver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
    """The counters of all GPUs of this host."""

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU, blocking for milliseconds. A GPU that fails to respond is left out."""
        ...

    def close(self) -> None:
        """Release the driver and its samples. Idempotent."""
        ...
