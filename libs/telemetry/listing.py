"""The cached list of live workers, with their latest loads as arrays. Pure."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from libs.contracts.roles import role_name
from libs.telemetry.worker.batch_columns import Bools, Ints
from libs.telemetry.worker.facts import WorkerFacts

RELIST_NS: Final = 1_000_000_000
"""The time for which a listing is reused while no worker changes its description. A worker that falls silent is given
up after minutes, so a second more does no harm.
"""
LISTED_FOR_NS: Final = 15 * 1_000_000_000
"""The time before its making for which a listing also holds. Some callers ask for now, others for the end of the
newest window.
"""
LOAD_NS: Final = 60 * 1_000_000_000
"""The time for which a silent worker's queues and slots count. Later, others have taken up its work."""
MOST_COUNTED: Final = 2**49
"""Bound on any count that a worker reports; higher ones are clipped. Sums over all workers then fit 64 bits."""

_COUNTS: Final = attrgetter("running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks")


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
    """Whether this process reads the worker's telemetry."""
    reader: str
    """Name of the other process that reads the worker's telemetry; empty if none does."""
    group: str = ""
    """Data-parallel group of which the worker is a rank; empty if there is none."""


class Listing:
    """The listed workers ordered by id. The same object is reused as long as its content stays the same."""

    def __init__(self, workers: Sequence[Listed]) -> None:
        self.workers = workers
        self.ids = [worker.worker_id for worker in workers]
        self._ids = frozenset(self.ids)
        self.own_ids = [worker.worker_id for worker in workers if worker.own]
        self.gpus: Ints = np.array([worker.gpus for worker in workers], np.int64)
        self.left: Bools = np.array([worker.left for worker in workers], np.bool_)
        self.pools = _pools(workers)
        """Places of the workers that have not left, by model and role."""

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._ids


class Loads(NamedTuple):
    """Arrays [workers] in the order of a listing; all zeros for a worker that has been silent for `LOAD_NS`."""

    listing: Listing
    heard: Bools
    """Whether the worker has reported within `LOAD_NS`."""
    covered_to_ns: Ints
    """End of the worker's telemetry, also for silent workers."""
    running: Ints
    waiting: Ints
    waiting_prefill_tokens: Ints
    awaiting_kv: Ints
    free_kv_blocks: Ints


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


def loads_of(listing: Listing, newest: Iterable[Any], now_ns: int) -> Loads:
    """Build loads from `newest`, the newest batch or facts of each listed worker in order."""
    reported = np.array([(each.covered_to_unix_ns, *_COUNTS(each.load)) for each in newest], np.uint64).reshape(-1, 6)
    covered_to_ns = reported[:, 0].astype(np.int64)
    heard = covered_to_ns > now_ns - LOAD_NS
    counts = np.where(heard[:, None], np.minimum(reported[:, 1:], np.uint64(MOST_COUNTED)), np.uint64(0)).astype(
        np.int64
    )
    return Loads(listing, heard, covered_to_ns, *counts.T)


def _pools(workers: Sequence[Listed]) -> dict[tuple[str, str], Ints]:
    pools: dict[tuple[str, str], list[int]] = {}
    for place, worker in enumerate(workers):
        if not worker.left:
            pools.setdefault((worker.model, worker.role), []).append(place)
    return {pool: np.array(places, np.int64) for pool, places in pools.items()}
