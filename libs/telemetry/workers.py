"""Workers by their own reports: the facts of a batch, the cached list of live workers with loads, and members. Pure."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute as ComputeMessage
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_name
from libs.perfmodel.utilisation import Compute
from libs.perfmodel.wire import compute_of
from libs.telemetry.columns import Bools, Ints
from libs.telemetry.rollups import MAX_WORKERS

# attrgetter reads protobuf fields in C, several times faster than one by one. The order is that of `WorkerFacts`.
_IDENTITY: Final = attrgetter(
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
    """The model's shape, from which utilisation is computed; None if unknown."""
    kv_blocks: int = 0
    """The number of KV blocks in the worker's pool; 0 if unknown."""
    max_sequences: int = 0
    """The maximum number of sequences that the worker runs at a time; 0 if unknown."""
    left: bool = False
    """True if the worker has sent its last batch."""
    group: str = ""
    """The data-parallel group of which the worker is a rank; empty if there is none."""
    dummy_steps: int = 0
    """The dummy steps that the worker has run since its start."""


class Shape:
    """The compute shape of a worker's model, which is decoded only when the report changes."""

    def __init__(self) -> None:
        self._reported = ComputeMessage()
        self.compute: Compute | None = None
        """The decoded shape; None while it is unknown."""
        self.from_ns = 0
        """The time of the shape's last change."""

    def take(self, batch: StepBatch) -> None:
        compute = batch.compute
        if compute != self._reported:
            self._reported.CopyFrom(compute)  # copied, because a submessage keeps its whole batch in memory
            self.from_ns = batch.covered_from_unix_ns
            self.compute = reported_compute(batch)


def reported_compute(batch: StepBatch) -> Compute | None:
    """Return the compute shape that a batch reports; None if it reports none."""
    return _compute_of(batch.compute.SerializeToString(deterministic=True)) if batch.HasField("compute") else None


MAX_SHAPES: Final = 256
"""The maximum number of decoded shapes that are cached. Workers of one model on equal GPUs have the same."""


@lru_cache(maxsize=MAX_SHAPES)
def _compute_of(message: bytes) -> Compute | None:
    return compute_of(ComputeMessage.FromString(message))


def facts_of(batch: StepBatch, compute: Compute | None = None) -> WorkerFacts:
    """Extract the worker's description from a batch; a worker that reports no GPUs counts as one."""
    facts = WorkerFacts._make((*_IDENTITY(batch), compute, *_MORE(batch)))
    return facts if facts.gpus else facts._replace(gpus=1)


RELIST_NS: Final = 1_000_000_000
"""The time for which a listing is reused while no worker changes its description. A silent worker is given up after
minutes, so one more second does no harm.
"""
LISTED_FOR_NS: Final = 15 * 1_000_000_000
"""The time before its creation for which a listing is also valid. Some callers request now, others the end of the
newest window.
"""
LOAD_NS: Final = 60 * 1_000_000_000
"""The time for which a silent worker's queues and slots count. After that, others have taken over its work."""
MOST_COUNTED: Final = 2**49
"""The bound on any count that a worker reports; larger ones are clipped. Sums over all workers then fit 64 bits."""

REPORTED: Final = (
    "covered_to_unix_ns", "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks",
)  # fmt: skip
"""The fields of a worker's newest batch from which `Loads` are built."""
_COVER: Final = attrgetter(REPORTED[0])
_COUNTS: Final = attrgetter(*REPORTED[1:])


class Listed(NamedTuple):
    """The part of a worker's description that seldom changes."""

    worker_id: str
    node: str
    model: str
    role: str
    gpus: int
    engine: str
    kv_blocks: int
    max_sequences: int
    left: bool
    own: bool
    """True if this process reads the worker's telemetry."""
    reader: str
    """The name of the other process that reads the worker's telemetry; empty if none does."""
    group: str = ""
    """The data-parallel group of which the worker is a rank; empty if there is none."""


class Listing:
    """The listed workers ordered by id. The same object is reused while its content stays the same."""

    def __init__(self, workers: Sequence[Listed]) -> None:
        self.workers = workers
        self.ids = [worker.worker_id for worker in workers]
        self.known_ids = frozenset(self.ids)
        self.own_ids = [worker.worker_id for worker in workers if worker.own]
        self.gpus: Ints = np.array([worker.gpus for worker in workers], np.int64)
        self.left: Bools = np.array([worker.left for worker in workers], np.bool_)
        self.pools = _pools(workers)
        """Indices of the workers that have not left, by model and role."""


class Loads(NamedTuple):
    """Arrays [workers] in the order of a listing; all zeros for a worker that has been silent for `LOAD_NS`."""

    listing: Listing
    reporting: Bools
    """True if the worker has reported within `LOAD_NS`."""
    covered_to_ns: Ints
    """The end of the worker's telemetry, also for silent workers."""
    running: Ints
    waiting: Ints
    waiting_prefill_tokens: Ints
    awaiting_kv: Ints
    free_kv_blocks: Ints


LISTED_FACTS: Final = ("node", "assignment", "gpus", "engine", "kv_blocks", "max_sequences", "left", "group")
"""The facts that `listed_of` reads in addition to the worker's id."""


def listed_of(facts: WorkerFacts, *, own: bool, reader: str) -> Listed:
    return Listed(
        facts.worker_id,
        facts.node,
        facts.assignment.model,
        role_name(facts.assignment),
        facts.gpus,
        facts.engine,
        facts.kv_blocks,
        facts.max_sequences,
        facts.left,
        own,
        reader,
        facts.group,
    )


def reported_of(newest: Sequence[Any]) -> NDArray[np.uint64]:
    """Return [workers, `REPORTED`] from the newest batch or facts of each worker."""
    found = np.empty((len(newest), len(REPORTED)), np.uint64)
    found[:, 0] = np.fromiter(map(_COVER, newest), np.uint64, len(newest))
    # Protobuf looks up a nested message anew each time, which costs as much as a count.
    counts = chain.from_iterable(_COUNTS(each.load) for each in newest)
    found[:, 1:] = np.fromiter(counts, np.uint64, found[:, 1:].size).reshape(found[:, 1:].shape)
    return found


def loads_of(listing: Listing, reported: NDArray[np.uint64], now_ns: int) -> Loads:
    """Build loads from the reports of each listed worker, [workers, `REPORTED`] in order."""
    covered_to_ns = reported[:, 0].astype(np.int64)
    reporting = covered_to_ns > now_ns - LOAD_NS
    counts = np.where(reporting[:, None], np.minimum(reported[:, 1:], np.uint64(MOST_COUNTED)), np.uint64(0)).astype(
        np.int64
    )
    return Loads(listing, reporting, covered_to_ns, *counts.T)


def _pools(workers: Sequence[Listed]) -> dict[tuple[str, str], Ints]:
    pools: dict[tuple[str, str], list[int]] = {}
    for place, worker in enumerate(workers):
        if not worker.left:
            pools.setdefault((worker.model, worker.role), []).append(place)
    return {pool: np.array(places, np.int64) for pool, places in pools.items()}


UNKNOWN: Final = "not heard of"
"""The node and model of a worker known only from windows."""


class Member(NamedTuple):
    """The last report of a worker, without the data in windows."""

    worker_id: str
    node: str
    model: str
    gpus: int
    group: str = ""
    """The data-parallel group of which the worker is a rank; empty if there is none."""

    @property
    def group_name(self) -> str:
        """The name of the group that is unique across models; empty for a worker without a group."""
        return group_name(self.model, self.group)


class Members:
    """Members by worker id. Beyond the roll-ups' bound, the worker that has been silent longest is dropped."""

    def __init__(self) -> None:
        self._known: dict[str, Member] = {}

    def enter(self, members: Iterable[Member]) -> None:
        """Add or replace members, which become the most recent ones."""
        for member in members:
            self._known.pop(member.worker_id, None)
            self._known[member.worker_id] = member
        while len(self._known) > MAX_WORKERS:
            del self._known[next(iter(self._known))]

    def get(self, worker_id: str) -> Member | None:
        return self._known.get(worker_id)

    def all(self) -> list[Member]:
        """Return all members, longest silent first."""
        return list(self._known.values())


def member_of(worker: Listed) -> Member:
    return Member(worker.worker_id, worker.node, worker.model, worker.gpus, worker.group)


def group_name(model: str, group: str) -> str:
    # Several models may use groups of one address, one after another.
    return f"{model}/{group}" if group else ""
