"""The known workers and the latest report of each. Pure."""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final

import numpy as np

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.telemetry.relayed import Relayed, RelayedRow, RelayTable, reported_by
from libs.telemetry.rollups import MAX_WORKERS
from libs.telemetry.timeline import Timeline
from libs.telemetry.workers import (
    LISTED_FACTS,
    LISTED_FOR_NS,
    LOAD_NS,
    RELIST_NS,
    REPORTED,
    Listing,
    Loads,
    WorkerFacts,
    listed_of,
    loads_of,
    reported_of,
)

LISTED_NS: Final = 300 * 1_000_000_000
"""The time for which a worker stays listed, and lowers coverage, after it fell silent while others still report. It
exceeds the delay of alerts: Prometheus's rule waits a minute over gauges of 15 s.
"""
LEFT_NS: Final = 60 * 1_000_000_000
"""The time for which a worker that left cleanly stays listed."""
BEHIND_NS: Final = 500_000_000
"""The lead of another process's report at which this process drops its own timeline of a worker."""
MAX_TABLES: Final = 256
"""The maximum number of reported tables; the one that was reported first gives way.

A process has one for each 1,000 of its workers. Steps have four partitions, and so four live readers, whose tables of
`MAX_WORKERS` are 20 at most. The others belong to processes that have ended, since most restarts bring a new name.
"""


_newest: Final = attrgetter("newest")
_described: Final = attrgetter("reader", *(f"facts.{name}" for name in LISTED_FACTS))


class WorkerDirectory:
    """The workers whose telemetry this process reads, and those reported by other processes."""

    def __init__(self) -> None:
        self.timelines: dict[str, Timeline] = {}
        """Timelines of the workers that this process reads. The fleet adds and removes them, then calls `mark_seen`."""
        self.relayed: dict[str, Relayed | RelayedRow] = {}
        """Workers that other processes report. A worker that this process reads is also here while the other process
        covers more of its time.
        """
        self._tables: dict[tuple[str, int], RelayTable] = {}
        """Reports of other processes as columns, by process and part."""
        self.newest_cover_ns = 0
        """The latest moment that any batch covers."""
        self._order: list[str] | None = None
        """All ids in order; None once they must be sorted again."""
        self._known: list[WorkerFacts] | None = None
        """Facts of all workers in the order of their ids; None after any change."""
        self._listing = Listing(())
        self._listed_ns: int | None = None
        """The time at which the listing was built; None once it must be rebuilt."""

    def mark_seen(self, worker_id: str, covered_to_ns: int) -> None:
        """Record that a worker of this process has reported up to `covered_to_ns`."""
        self.newest_cover_ns = max(self.newest_cover_ns, covered_to_ns)
        self._known = None
        if worker_id not in self._listing.known_ids:  # the worker was given up or had left
            self._listed_ns = None
        relayed = self.relayed.get(worker_id) if self.relayed else None
        if relayed is not None and covered_to_ns > relayed.covered_to_ns:
            relayed.detach()
            del self.relayed[worker_id]
            self._listed_ns = None

    def covers_more(self, worker_id: str, covered_to_ns: int) -> bool:
        """Return whether more of a worker's time is known here than another process reports."""
        timeline, known = self.timelines.get(worker_id), self.relayed.get(worker_id)
        newest = None if timeline is None else timeline.newest
        if newest is not None and newest.covered_to_unix_ns > covered_to_ns - BEHIND_NS:
            return True
        return known is not None and known.covered_to_ns > covered_to_ns

    def table(self, reader: str, part: int) -> RelayTable:
        """Return the table of a part of the workers that the process `reader` reports."""
        table = self._tables.get((reader, part))
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.pop(next(iter(self._tables))).enrol([])
            table = self._tables[reader, part] = RelayTable(reader)
        return table

    def relay_rows(self, table: RelayTable, places: Iterable[int], newest_cover_ns: int) -> None:
        """Make the workers at `places` follow a table from now on. Its newest columns cover time up to
        `newest_cover_ns`.
        """
        for place in places:
            self.relay(table.attach(place))
        self.newest_cover_ns = max(newest_cover_ns, self.newest_cover_ns)
        self._known = None

    def relay(self, worker: Relayed | RelayedRow) -> None:
        """Record the state of a worker that another process reads."""
        worker_id, covered_to_ns = worker.facts.worker_id, worker.covered_to_ns
        known = self.relayed.get(worker_id)
        if known is None and len(self.relayed) >= MAX_WORKERS:
            self.relayed.pop(self.longest_silent(self.relayed)).detach()
        elif known is not None and known is not worker:
            known.detach()
        self.relayed[worker_id] = worker
        self.newest_cover_ns = max(covered_to_ns, self.newest_cover_ns)
        self._known = None
        if known is None:
            self.came_or_went()
        elif worker_id not in self._listing.known_ids or _described(known) != _described(worker):
            self._listed_ns = None

    def said_new(self) -> None:
        """Invalidate cached facts after a worker of this process changed its description."""
        self._known = self._listed_ns = None

    def came_or_went(self) -> None:
        """Invalidate cached facts after workers were added or removed."""
        self._order = self._known = self._listed_ns = None

    def is_own(self, worker_id: str) -> bool:
        """Return whether this process reads the worker's telemetry."""
        return worker_id in self.timelines

    def reader(self, worker_id: str) -> str | None:
        """Return the other process that reads a worker's telemetry; None if none does."""
        relayed = self.relayed.get(worker_id)
        return relayed.reader if relayed else None

    def newest(self, worker_id: str) -> Relayed | RelayedRow | Timeline | None:
        """Return the source that covers most of a worker's time; None for an unknown worker."""
        return self.relayed.get(worker_id) or self.timelines.get(worker_id)

    def facts(self, worker_id: str) -> WorkerFacts | None:
        known = self.newest(worker_id)
        return known.facts if known else None

    def lost_batches(self, worker_id: str) -> int:
        """Return the number of a worker's batches lost so far."""
        known = self.newest(worker_id)
        return known.lost_batches if known else 0

    def known(self) -> Iterator[WorkerFacts]:
        """Iterate over the facts of all workers, ordered by id. They are extracted when the first one is consumed."""
        if self._order is None:
            self._order = sorted({**self.timelines, **self.relayed})
        if self._known is None:
            known = map(self.newest, self._order)
            self._known = [each.facts for each in known if each is not None and each.facts is not None]
        yield from self._known

    def listed(self, now_ns: int) -> Iterator[WorkerFacts]:
        """Iterate by id over workers that have neither been silent for `LISTED_NS` nor gone for `LEFT_NS`.

        Silence is measured against the newest report of any worker, so no worker is given up when all are silent. After
        `LOAD_NS` a silent worker's queues and slots count as zero, while its cumulative counters stay.
        """
        fresh_after_ns = now_ns - LOAD_NS
        for facts in self.known():
            is_fresh = facts.covered_to_unix_ns > fresh_after_ns
            if is_fresh and not facts.left:  # the usual case
                yield facts
            elif self._is_listed(facts, now_ns):
                yield facts if is_fresh else facts._replace(load=_counted(facts.load), kv_blocks=0, max_sequences=0)

    def listing(self, now_ns: int) -> Listing:
        """Return the cached list of the workers that `listed` yields, without the facts that change from batch to
        batch.
        """
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
        if not relayed:
            newest = list(map(_newest, map(timelines.__getitem__, listing.ids)))
            return loads_of(listing, reported_of(newest), now_ns)
        reported = np.zeros((len(listing.ids), len(REPORTED)), np.uint64)
        others = [relayed.get(name) for name in listing.ids]
        single = [place for place, each in enumerate(others) if not isinstance(each, RelayedRow)]
        newest = [timelines[listing.ids[place]].newest if others[place] is None else others[place] for place in single]
        reported[single] = reported_of([each.facts if isinstance(each, Relayed) else each for each in newest])
        rows = [(place, each) for place, each in enumerate(others) if isinstance(each, RelayedRow)]
        if rows:
            reported[[place for place, _ in rows]] = reported_by([row for _, row in rows])
        return loads_of(listing, reported, now_ns)

    def silent_elsewhere(self, since_ns: int, now_ns: int) -> list[WorkerFacts]:
        """Return listed workers of other processes that have not left and whose last report covers less than
        `since_ns`.
        """
        silent = [each.facts for each in self.relayed.values() if each.covered_to_ns < since_ns]
        return [facts for facts in silent if not facts.left and self._is_listed(facts, now_ns)]

    def longest_silent(self, worker_ids: Iterable[str]) -> str:
        """Return the worker among `worker_ids` that has been silent for longest."""
        return min(worker_ids, key=self._reported_ns)

    def _reported_ns(self, worker_id: str) -> int:
        facts = self.facts(worker_id)
        return facts.covered_to_unix_ns if facts else 0

    def _is_listed(self, facts: WorkerFacts, now_ns: int) -> bool:
        silent_since_ns = min(now_ns, self.newest_cover_ns) - LISTED_NS
        return facts.covered_to_unix_ns > (now_ns - LEFT_NS if facts.left else silent_since_ns)


def _counted(load: Load) -> Load:
    # Cumulative counters must not fall: the next report would be mistaken for new work after the silence.
    return Load(
        preemptions=load.preemptions,
        recomputed_tokens=load.recomputed_tokens,
        pool_faults=load.pool_faults,
        refused_kv_pulls=load.refused_kv_pulls,
        images_used=load.images_used,
        images_encoded=load.images_encoded,
        image_encode_ns=load.image_encode_ns,
    )
