"""Cached list of live workers, with their latest loads as arrays. Pure."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from libs.contracts.roles import role_name
from libs.telemetry.worker.batch_columns import Bools, Ints
from libs.telemetry.worker.facts import WorkerFacts

RELIST_NS: Final = 1_000_000_000
"""How long the same list is given out while nobody says anything new of itself: who falls silent is given up after
minutes, and may be so a second later."""
LISTED_FOR_NS: Final = 15 * 1_000_000_000
"""It also stands for moments so long before: some ask of now, others of where the newest window ends."""
LOAD_NS: Final = 60 * 1_000_000_000
"""How long what a silent worker said of its queues and places is held true: what it had, others have taken up."""
MOST_COUNTED: Final = 2**49
"""Bound on any count that a worker reports; a higher one is invalid. Sums over all workers then fit 64 bits."""

_COUNTS: Final = attrgetter("running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks")


class Listed(NamedTuple):
    """What a worker says of itself again and again."""

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
    """Its telemetry comes here."""
    reader: str
    """The process that reads it in place of this one; empty where none does."""
    group: str = ""
    """Data-parallel group of which it is a rank; empty: of none."""


class Listing:
    """Workers by id; the same object as long as it says the same."""

    def __init__(self, workers: Sequence[Listed]) -> None:
        self.workers = workers
        self.ids = [worker.worker_id for worker in workers]
        self._ids = frozenset(self.ids)
        self.own_ids = [worker.worker_id for worker in workers if worker.own]
        self.gpus: Ints = np.array([worker.gpus for worker in workers], np.int64)
        self.left: Bools = np.array([worker.left for worker in workers], np.bool_)
        self.pools = _pools(workers)
        """Places of those that have not left, by model and role."""

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._ids


class Loads(NamedTuple):
    """[workers] each, of a listing's in its order; nothing but zeros of one that has been silent for `LOAD_NS`."""

    listing: Listing
    heard: Bools
    """It has not."""
    covered_to_ns: Ints
    """Where its telemetry ends, of the silent ones too."""
    running: Ints
    waiting: Ints
    waiting_prefill_tokens: Ints
    awaiting_kv: Ints
    free_kv_blocks: Ints


def listed_of(facts: WorkerFacts, *, own: bool, reader: str) -> Listed:
    """From a worker's own words."""
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
    """Loads from `newest`: the newest batch or facts of each listed worker, in order."""
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
