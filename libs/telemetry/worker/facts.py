"""What a worker says of itself beside what it did. Pure."""

from operator import attrgetter
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute as ComputeMessage
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.perfmodel.utilisation import Compute
from libs.perfmodel.wire import compute_of

# Attributes of protobuf's are read in C by these, several times faster than one by one; in the order of `WorkerFacts`.
_TOLD: Final = attrgetter(
    "worker_id", "incarnation", "node", "gpus", "engine", "assignment", "load", "covered_to_unix_ns", "dropped_batches"
)
what_stays: Final = attrgetter("node", "gpus", "engine", "assignment", "compute", "kv_blocks", "max_sequences", "group")
"""What a batch says of its worker, and the next one too, but where it has something new to say."""
_MORE: Final = attrgetter("kv_blocks", "max_sequences", "last", "group", "dummy_steps.steps")


class WorkerFacts(NamedTuple):
    """What a worker's newest batch says of it."""

    worker_id: str
    incarnation: int
    node: str
    gpus: int
    engine: str
    assignment: Assignment
    load: Load
    covered_to_unix_ns: int
    dropped_batches: int
    compute: Compute | None = None
    """What utilisation is reckoned from; None: unknown."""
    kv_blocks: int = 0
    """KV blocks of its pool; 0: unknown."""
    max_sequences: int = 0
    """That it runs at a time; 0: unknown."""
    left: bool = False
    """The worker has sent its last batch."""
    group: str = ""
    """Data-parallel group of which it is a rank; empty: of none."""
    dummy_steps: int = 0
    """That it has run since it began."""


class Shape:
    """What a worker's model computes with, read again only where it says something else."""

    def __init__(self) -> None:
        self._reported = ComputeMessage()
        self.compute: Compute | None = None
        """None: unknown."""
        self.from_ns = 0
        """Since when it has been that."""

    def take(self, batch: StepBatch) -> None:
        """Take the model's shape from a batch."""
        compute = batch.compute
        if compute != self._reported:
            self._reported.CopyFrom(compute)  # a part of a batch keeps all of it in memory
            self.from_ns = batch.covered_from_unix_ns
            self.compute = reported_compute(batch)


def reported_compute(batch: StepBatch) -> Compute | None:
    """What a batch says that its worker computes with; None where it says nothing."""
    return compute_of(batch.compute) if batch.HasField("compute") else None


def facts_of(batch: StepBatch, compute: Compute | None = None) -> WorkerFacts:
    """What a batch says of its worker."""
    facts = WorkerFacts._make((*_TOLD(batch), compute, *_MORE(batch)))
    return facts if facts.gpus else facts._replace(gpus=1)
