"""Parts of a worker's idle time whose cause the worker reports. They never reduce other phases."""

from collections.abc import Iterator

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.telemetry.worker.intervals import Intervals

LATE_NS = 10_000_000_000
"""The time before its batch's cover at which a dummy step may begin. Engines report dummy steps late, and one may be
long.
"""


class IdleParts:
    """Idle time by cause. Spans that are empty or that lie outside the reach of their batch are left out."""

    def __init__(self) -> None:
        self.starved = Intervals()
        """Time in which all KV that sequences awaited was still being computed elsewhere."""
        self.dummies = Intervals()
        """Time of steps that computed for no sequence, as another rank of the data-parallel group had work."""

    def __iter__(self) -> Iterator[Intervals]:
        return iter((self.starved, self.dummies))

    def take(self, batch: StepBatch) -> None:
        """Record the idle parts that a batch reports."""
        from_ns, to_ns = batch.covered_from_unix_ns, batch.covered_to_unix_ns
        for span in batch.starved:
            if from_ns <= span.start_unix_ns < span.end_unix_ns <= to_ns:
                self.starved.add(span.start_unix_ns, span.end_unix_ns)
        if batch.HasField("dummy_steps"):
            for span in batch.dummy_steps.spans:
                if max(from_ns - LATE_NS, 0) < span.start_unix_ns < span.end_unix_ns <= to_ns:
                    self.dummies.add(span.start_unix_ns, span.end_unix_ns)

    def forget_before(self, point_ns: int) -> None:
        for part in self:
            part.forget_before(point_ns)

    def forget_from(self, point_ns: int) -> None:
        for part in self:
            part.forget_from(point_ns)
