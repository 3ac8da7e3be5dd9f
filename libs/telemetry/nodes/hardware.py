"""The latest hardware counters of every GPU, bounded in number. A GPU without recent readings is absent, not idle."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from libs.contracts.pb.fulcrum.telemetry.v1 import telemetry_pb2 as pb
from libs.counters import GpuReading

MAX_GPUS: Final = 16_384
FRESH_NS: Final = 5 * 1_000_000_000
"""The furthest from a moment that a reading may lie and still describe it. Readings come once a second."""


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU's reading with its node and the time it was taken."""

    node: str
    read_unix_ns: int
    reading: GpuReading


class NodeGpus:
    """Readings keyed by node and by the GPU's UUID."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], SeenGpu] = {}

    def add(self, batch: pb.StepBatch) -> None:
        """Record a worker's readings of its node's GPUs; readings older than the known ones change nothing."""
        for message in batch.gpu_readings or ():  # iterating an empty protobuf list is slow
            reading = _reading(message)
            key = (batch.node, message.uuid)
            known = self._seen.get(key)
            if reading is None or (known is not None and known.read_unix_ns >= batch.covered_to_unix_ns):
                continue
            if known is None and len(self._seen) >= MAX_GPUS:
                del self._seen[min(self._seen, key=lambda each: self._seen[each].read_unix_ns)]
            self._seen[key] = SeenGpu(batch.node, batch.covered_to_unix_ns, reading)

    def fresh(self, now_ns: int) -> Iterator[SeenGpu]:
        """Yield readings less than `FRESH_NS` away from `now_ns`, by node and index. Only the latest reading of a GPU
        is kept.
        """
        for seen in sorted(self._seen.values(), key=lambda each: (each.node, each.reading.index)):
            if abs(seen.read_unix_ns - now_ns) < FRESH_NS:
                yield seen


def _reading(message: pb.GpuReading) -> GpuReading | None:
    """Return the reading; None if any number is not finite."""
    present = {field.name for field, _ in message.ListFields()}
    values: dict[str, Any] = {"uuid": "", "index": 0, "name": ""}
    values |= {field.name: getattr(message, field.name) for field in fields(GpuReading) if field.name in present}
    sound = all(math.isfinite(value) for value in values.values() if isinstance(value, float))
    return GpuReading(**values) if sound else None
