"""Who is known, and what each said last of itself. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWorker
from libs.telemetry.listing import LISTED_FOR_NS, LOAD_NS, RELIST_NS, Listed, Listing, Loads, listed_of, loads_of
from libs.telemetry.worker.facts import WorkerFacts, facts_of, reported_compute
from libs.telemetry.worker.steps import FULL_SHARE, RunningStep
from libs.telemetry.worker.timeline import Timeline

LISTED_NS: Final = 300 * 1_000_000_000
"""A worker that is silent for this much longer than the others is given up; until then it is listed and lowers
coverage. It is longer than an alert takes: Prometheus's rule waits a minute, over gauges of 15 s."""
LEFT_NS: Final = 60 * 1_000_000_000
"""How long one that left in good order is still listed."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A worker whose telemetry another process reads, as that process reports it."""

    facts: WorkerFacts
    last_step_end_ns: int
    lost_batches: int
    running_step: RunningStep | None
    reader: str = ""
    """Name of the process that reads it."""

    def listed(self) -> Listed:
        """Its entry in a listing."""
        return listed_of(self.facts, own=False, reader=self.reader)


def relayed_of(worker: SharedWorker, reader: str) -> Relayed:
    """A worker from the report of the process `reader`."""
    batch = worker.newest
    facts = facts_of(batch, reported_compute(batch))
    return Relayed(facts, worker.last_step_end_unix_ns, worker.lost_batches, _running_step(worker), reader)


def _running_step(worker: SharedWorker) -> RunningStep | None:
    if not 0 < worker.running_step_unix_ns <= worker.newest.covered_to_unix_ns:
        return None
    return worker.running_step_unix_ns, min(worker.running_step_share, FULL_SHARE)


class WorkerDirectory:
    """Workers whose telemetry comes here, and those that others report."""

    def __init__(self) -> None:
        self.timelines: dict[str, Timeline] = {}
        """Timelines of the workers that this process reads; the fleet adds and removes them, then calls `heard`."""
        self.relayed: dict[str, Relayed] = {}
        """While a worker's telemetry comes here it is here too as long as this covers more."""
        self.newest_cover_ns = 0
        """The latest moment that any batch covers."""
        self._order: list[str] | None = None
        """All ids in order; None: to be sorted again."""
        self._known: list[WorkerFacts] | None = None
        """In that order; None: something has come since."""
        self._listing = Listing(())
        self._listed_ns: int | None = None
        """When that was made; None: to be made again."""

    def heard(self, worker_id: str, covered_to_ns: int) -> None:
        """Record that a worker of this process has reported up to `covered_to_ns`."""
        self.newest_cover_ns = max(covered_to_ns, self.newest_cover_ns)
        self._known = None
        if worker_id not in self._listing:  # it was given up, or left
            self._listed_ns = None
        relayed = self.relayed.get(worker_id)
        if relayed is not None and covered_to_ns > relayed.facts.covered_to_unix_ns:
            del self.relayed[worker_id]
            self._listed_ns = None

    def relay(self, worker: Relayed) -> None:
        """Take a worker that another process reads."""
        worker_id, covered_to_ns = worker.facts.worker_id, worker.facts.covered_to_unix_ns
        known = self.relayed.get(worker_id)
        self.relayed[worker_id] = worker
        self.newest_cover_ns = max(covered_to_ns, self.newest_cover_ns)
        self._known = None
        if known is None:
            self.came_or_went()
        elif worker_id not in self._listing or known.listed() != worker.listed():
            self._listed_ns = None

    def said_new(self) -> None:
        """An own worker says something else of itself than before."""
        self._known = self._listed_ns = None

    def came_or_went(self) -> None:
        """Others are known than before."""
        self._order = self._known = self._listed_ns = None

    def is_own(self, worker_id: str) -> bool:
        """Whether its telemetry comes here."""
        return worker_id in self.timelines

    def reader(self, worker_id: str) -> str | None:
        """The process that reads a worker's telemetry in place of this one; None where none does."""
        relayed = self.relayed.get(worker_id)
        return relayed.reader if relayed else None

    def newest(self, worker_id: str) -> Relayed | Timeline | None:
        """Who knows most of a worker; None for a stranger."""
        return self.relayed.get(worker_id) or self.timelines.get(worker_id)

    def facts(self, worker_id: str) -> WorkerFacts | None:
        """What a worker last said of itself."""
        known = self.newest(worker_id)
        return known.facts if known else None

    def lost_batches(self, worker_id: str) -> int:
        """Batches of a worker that never came, so far."""
        known = self.newest(worker_id)
        return known.lost_batches if known else 0

    def known(self) -> Iterator[WorkerFacts]:
        """All workers, by id."""
        if self._order is None:
            self._order = sorted({**self.timelines, **self.relayed})
        if self._known is None:
            known = map(self.newest, self._order)
            self._known = [each.facts for each in known if each is not None and each.facts is not None]
        return iter(self._known)

    def listed(self, now_ns: int) -> Iterator[WorkerFacts]:
        """Workers that have not been silent for `LISTED_NS`, nor gone for `LEFT_NS`, by id.

        Silence is measured by what was last heard of anybody: when nobody is heard, nobody is given up. Queues and
        places of the silent are left out after `LOAD_NS`; what they have counted stays.
        """
        heard_from_ns = now_ns - LOAD_NS
        for facts in self.known():
            heard = facts.covered_to_unix_ns > heard_from_ns
            if heard and not facts.left:  # nearly all, and they are listed
                yield facts
            elif self._is_listed(facts, now_ns):
                yield facts if heard else facts._replace(load=_counted(facts.load), kv_blocks=0, max_sequences=0)

    def listing(self, now_ns: int) -> Listing:
        """`listed`, but for what changes from batch to batch."""
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
        """The latest loads of the workers of `listing`."""
        listing, relayed, timelines = self.listing(now_ns), self.relayed, self.timelines
        newest = [relayed[name].facts if name in relayed else timelines[name].newest for name in listing.ids]
        return loads_of(listing, newest, now_ns)

    def silent_elsewhere(self, since_ns: int, now_ns: int) -> list[WorkerFacts]:
        """Listed workers of other processes that have not left and whose last report covers less than `since_ns`."""
        silent = (each.facts for each in self.relayed.values() if each.facts.covered_to_unix_ns < since_ns)
        return [facts for facts in silent if not facts.left and self._is_listed(facts, now_ns)]

    def longest_silent(self, worker_ids: Iterable[str]) -> str:
        """The worker among `worker_ids` that has been silent for longest."""
        return min(worker_ids, key=self._heard_ns)

    def _heard_ns(self, worker_id: str) -> int:
        facts = self.facts(worker_id)
        return facts.covered_to_unix_ns if facts else 0

    def _is_listed(self, facts: WorkerFacts, now_ns: int) -> bool:
        silent_since_ns = min(now_ns, self.newest_cover_ns) - LISTED_NS
        return facts.covered_to_unix_ns > (now_ns - LEFT_NS if facts.left else silent_since_ns)


def _counted(load: Load) -> Load:
    """What does not end with silence: counters that went back would be taken for new work once it is over."""
    return Load(
        preemptions=load.preemptions,
        recomputed_tokens=load.recomputed_tokens,
        pool_faults=load.pool_faults,
        refused_kv_pulls=load.refused_kv_pulls,
    )
