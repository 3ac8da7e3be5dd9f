"""A worker's description of itself, as its batches carry it beside the steps. Pure."""

from operator import attrgetter
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute as ComputeMessage
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.perfmodel.utilisation import Compute
from libs.perfmodel.wire import compute_of

# attrgetter reads protobuf fields in C, several times faster than one by one. The order is that of `WorkerFacts`.
_TOLD: Final = attrgetter(
    "worker_id", "incarnation", "node", "gpus", "engine", "assignment", "load", "covered_to_unix_ns", "dropped_batches"
)
what_stays: Final = attrgetter("node", "gpus", "engine", "assignment", "compute", "kv_blocks", "max_sequences", "group")
"""The fields of a batch that seldom change between a worker's batches."""
_MORE: Final = attrgetter("kv_blocks", "max_sequences", "last", "group", "dummy_steps.steps")


class WorkerFacts(NamedTuple):
    """The description of a worker from its newest batch."""

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
    """What utilisation is computed from; None if unknown."""
    kv_blocks: int = 0
    """Number of KV blocks in the worker's pool; 0 if unknown."""
    max_sequences: int = 0
    """The most sequences that the worker runs at a time; 0 if unknown."""
    left: bool = False
    """Whether the worker has sent its last batch."""
    group: str = ""
    """Data-parallel group of which the worker is a rank; empty if there is none."""
    dummy_steps: int = 0
    """Dummy steps that the worker has run since its start."""


class Shape:
    """The compute shape of a worker's model, decoded again only when the report changes."""

    def __init__(self) -> None:
        self._reported = ComputeMessage()
        self.compute: Compute | None = None
        """The decoded shape; None while it is unknown."""
        self.from_ns = 0
        """Time since which the shape has been as it is."""

    def take(self, batch: StepBatch) -> None:
        compute = batch.compute
        if compute != self._reported:
            self._reported.CopyFrom(compute)  # copied, as a submessage keeps its whole batch in memory
            self.from_ns = batch.covered_from_unix_ns
            self.compute = reported_compute(batch)


def reported_compute(batch: StepBatch) -> Compute | None:
    """Return the compute shape that a batch reports; None if it reports none."""
    return compute_of(batch.compute) if batch.HasField("compute") else None


def facts_of(batch: StepBatch, compute: Compute | None = None) -> WorkerFacts:
    """Extract the worker's description from a batch; a worker that reports no GPUs counts as one."""
    facts = WorkerFacts._make((*_TOLD(batch), compute, *_MORE(batch)))
    return facts if facts.gpus else facts._replace(gpus=1)
