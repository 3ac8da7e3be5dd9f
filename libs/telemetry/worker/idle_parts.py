"""Parts of a worker's idle time that it knows the reason of. They claim no time but of what is idle."""

from collections.abc import Iterator

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.telemetry.worker.intervals import Intervals

LATE_NS = 10_000_000_000
"""How long before its batch's cover a dummy step may have begun: engines say it late, and a step may be long."""


class IdleParts:
    """Spans that are none, or lie where their batch can say nothing, are left out."""

    def __init__(self) -> None:
        self.starved = Intervals()
        """All KV that sequences awaited was still to be computed elsewhere."""
        self.dummies = Intervals()
        """A step ran that computed nothing of anybody's: another rank of the data-parallel group had work."""

    def __iter__(self) -> Iterator[Intervals]:
        return iter((self.starved, self.dummies))

    def take(self, batch: StepBatch) -> None:
        """Enter what a batch says of them."""
        from_ns, to_ns = batch.covered_from_unix_ns, batch.covered_to_unix_ns
        for span in batch.starved:
            if from_ns <= span.start_unix_ns < span.end_unix_ns <= to_ns:
                self.starved.add(span.start_unix_ns, span.end_unix_ns)
        if batch.HasField("dummy_steps"):
            for span in batch.dummy_steps.spans:
                if max(from_ns - LATE_NS, 0) < span.start_unix_ns < span.end_unix_ns <= to_ns:
                    self.dummies.add(span.start_unix_ns, span.end_unix_ns)

    def forget_before(self, point_ns: int) -> None:
        """Drop everything below `point_ns`."""
        for part in self:
            part.forget_before(point_ns)

    def forget_from(self, point_ns: int) -> None:
        """Drop everything at and above `point_ns`."""
        for part in self:
            part.forget_from(point_ns)
