"""The workers that are known, and the latest report of each. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWorker
from libs.telemetry.steps import FULL_SHARE, RunningStep
from libs.telemetry.timeline import Timeline
from libs.telemetry.workers import (
    LISTED_FACTS,
    LISTED_FOR_NS,
    LOAD_NS,
    RELIST_NS,
    Listing,
    Loads,
    WorkerFacts,
    facts_of,
    listed_of,
    loads_of,
    reported_compute,
)

LISTED_NS: Final = 300 * 1_000_000_000
"""The time for which a worker stays listed, and lowers coverage, after it fell silent while others still report. It
exceeds the delay of alerts: Prometheus's rule waits a minute over gauges of 15 s.
"""
LEFT_NS: Final = 60 * 1_000_000_000
"""The time for which a worker that left in good order stays listed."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A worker whose telemetry another process reads, as that process reports it."""

    facts: WorkerFacts
    last_step_end_ns: int
    lost_batches: int
    running_step: RunningStep | None
    reader: str = ""
    """The name of the process that reads the worker's telemetry."""

    @property
    def incarnation(self) -> int:
        return self.facts.incarnation


_described: Final = attrgetter("reader", *(f"facts.{name}" for name in LISTED_FACTS))


def relayed_of(worker: SharedWorker, reader: str) -> Relayed:
    """Build the entry of a worker that the process `reader` reports."""
    batch = worker.newest
    facts = facts_of(batch, reported_compute(batch))
    return Relayed(facts, worker.last_step_end_unix_ns, worker.lost_batches, _running_step(worker), reader)


def _running_step(worker: SharedWorker) -> RunningStep | None:
    if not 0 < worker.running_step_unix_ns <= worker.newest.covered_to_unix_ns:
        return None
    return worker.running_step_unix_ns, min(worker.running_step_share, FULL_SHARE)


class WorkerDirectory:
    """The workers whose telemetry this process reads, and those that other processes report."""

    def __init__(self) -> None:
        self.timelines: dict[str, Timeline] = {}
        """Timelines of the workers that this process reads. The fleet adds and removes them, then calls `heard`."""
        self.relayed: dict[str, Relayed] = {}
        """Workers that other processes report. A worker that this process reads is also here while the other process
        covers more of its time.
        """
        self.newest_cover_ns = 0
        """The latest moment that any batch covers."""
        self._order: list[str] | None = None
        """All ids in order; None once they must be sorted again."""
        self._known: list[WorkerFacts] | None = None
        """Facts of all workers in the order of their ids; None once anything new has come."""
        self._listing = Listing(())
        self._listed_ns: int | None = None
        """The time at which the listing was made; None once it must be rebuilt."""

    def heard(self, worker_id: str, covered_to_ns: int) -> None:
        """Record that a worker of this process has reported up to `covered_to_ns`."""
        self.newest_cover_ns = max(self.newest_cover_ns, covered_to_ns)
        self._known = None
        if worker_id not in self._listing.known_ids:  # it was given up or had left
            self._listed_ns = None
        relayed = self.relayed.get(worker_id) if self.relayed else None
        if relayed is not None and covered_to_ns > relayed.facts.covered_to_unix_ns:
            del self.relayed[worker_id]
            self._listed_ns = None

    def relay(self, worker: Relayed) -> None:
        """Record the state of a worker that another process reads."""
        worker_id, covered_to_ns = worker.facts.worker_id, worker.facts.covered_to_unix_ns
        known = self.relayed.get(worker_id)
        self.relayed[worker_id] = worker
        self.newest_cover_ns = max(covered_to_ns, self.newest_cover_ns)
        self._known = None
        if known is None:
            self.came_or_went()
        elif worker_id not in self._listing.known_ids or _described(known) != _described(worker):
            self._listed_ns = None

    def said_new(self) -> None:
        """Invalidate what is cached after a worker of this process changed its description."""
        self._known = self._listed_ns = None

    def came_or_went(self) -> None:
        """Invalidate what is cached after workers were added or removed."""
        self._order = self._known = self._listed_ns = None

    def is_own(self, worker_id: str) -> bool:
        """Report whether this process reads the worker's telemetry."""
        return worker_id in self.timelines

    def reader(self, worker_id: str) -> str | None:
        """Return the other process that reads a worker's telemetry; None if none does."""
        relayed = self.relayed.get(worker_id)
        return relayed.reader if relayed else None

    def newest(self, worker_id: str) -> Relayed | Timeline | None:
        """Return the source that covers most of a worker's time; None for an unknown worker."""
        return self.relayed.get(worker_id) or self.timelines.get(worker_id)

    def facts(self, worker_id: str) -> WorkerFacts | None:
        known = self.newest(worker_id)
        return known.facts if known else None

    def lost_batches(self, worker_id: str) -> int:
        """Return how many of a worker's batches have been lost so far."""
        known = self.newest(worker_id)
        return known.lost_batches if known else 0

    def known(self) -> Iterator[WorkerFacts]:
        """Iterate over the facts of all workers, ordered by id. They are extracted once the first one is taken."""
        if self._order is None:
            self._order = sorted({**self.timelines, **self.relayed})
        if self._known is None:
            known = map(self.newest, self._order)
            self._known = [each.facts for each in known if each is not None and each.facts is not None]
        yield from self._known

    def listed(self, now_ns: int) -> Iterator[WorkerFacts]:
        """Iterate by id over workers that have neither been silent for `LISTED_NS` nor gone for `LEFT_NS`.

        Silence is measured against the newest report of any worker, so nobody is given up when all are silent.
        After `LOAD_NS` a silent worker's queues and slots count as zero, while its cumulative counters stay.
        """
        heard_from_ns = now_ns - LOAD_NS
        for facts in self.known():
            heard = facts.covered_to_unix_ns > heard_from_ns
            if heard and not facts.left:  # the usual case
                yield facts
            elif self._is_listed(facts, now_ns):
                yield facts if heard else facts._replace(load=_counted(facts.load), kv_blocks=0, max_sequences=0)

    def listing(self, now_ns: int) -> Listing:
        """Return the cached list of the workers that `listed` yields, without what changes from batch to batch."""
        made_ns = self._listed_ns
        if made_ns is not None and made_ns - LISTED_FOR_NS < now_ns < made_ns + RELIST_NS:
            return self._listing
        known = [facts for facts in self.known() if self._is_listed(facts, now_ns)]
        workers = [
            listed_of(facts, own=self.is_own(facts.worker_id), reader=self.reader(facts.worker_id) or "")
            for facts in known
        ]
        if workers != self._listing.workers:
            self._listing = Listing(workers)
        self._listed_ns = now_ns
        return self._listing

    def loads(self, now_ns: int) -> Loads:
        """Return the latest loads of the workers of `listing`."""
        listing, relayed, timelines = self.listing(now_ns), self.relayed, self.timelines
        newest = [relayed[name].facts if name in relayed else timelines[name].newest for name in listing.ids]
        return loads_of(listing, newest, now_ns)

    def silent_elsewhere(self, since_ns: int, now_ns: int) -> list[WorkerFacts]:
        """Return listed workers of other processes that have not left and whose last report covers less than
        `since_ns`.
        """
        silent = (each.facts for each in self.relayed.values() if each.facts.covered_to_unix_ns < since_ns)
        return [facts for facts in silent if not facts.left and self._is_listed(facts, now_ns)]

    def longest_silent(self, worker_ids: Iterable[str]) -> str:
        """Return the worker among `worker_ids` that has been silent for longest."""
        return min(worker_ids, key=self._heard_ns)

    def _heard_ns(self, worker_id: str) -> int:
        facts = self.facts(worker_id)
        return facts.covered_to_unix_ns if facts else 0

    def _is_listed(self, facts: WorkerFacts, now_ns: int) -> bool:
        silent_since_ns = min(now_ns, self.newest_cover_ns) - LISTED_NS
        return facts.covered_to_unix_ns > (now_ns - LEFT_NS if facts.left else silent_since_ns)


def _counted(load: Load) -> Load:
    # Cumulative counters must not fall: the next report would pass for new work once the silence is over.
    return Load(
        preemptions=load.preemptions,
        recomputed_tokens=load.recomputed_tokens,
        pool_faults=load.pool_faults,
        refused_kv_pulls=load.refused_kv_pulls,
        images_used=load.images_used,
        images_encoded=load.images_encoded,
        image_encode_ns=load.image_encode_ns,
    )
