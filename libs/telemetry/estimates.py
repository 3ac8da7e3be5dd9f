"""Bounds of prefill's share of workers whose times are estimated. Pure."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.policy.newest import put_newest
from libs.telemetry.rollups import MAX_WORKERS

MAX_KEPT: Final = 32
"""Estimates kept per worker: a quarter of a minute at two per second."""


class ShareBounds(NamedTuple):
    """Bounds of prefill's share of busy time, and the share; all None if nothing ran, or too long ago."""

    prefill: float | None
    low: float | None
    high: float | None


UNBOUNDED: Final = ShareBounds(None, None, None)


class EstimatedNs(NamedTuple):
    """Estimated time in ns: busy, and its prefill part with bounds."""

    busy_ns: int
    prefill_ns: int
    low_ns: int
    high_ns: int


NOTHING: Final = EstimatedNs(0, 0, 0, 0)


ROW: Final = 6
"""The numbers of an estimate: the ends of its stretch of time, then those of `EstimatedNs`."""


def _sum(times: Iterable[EstimatedNs]) -> EstimatedNs:
    return EstimatedNs(*map(sum, zip(NOTHING, *times, strict=True)))


class Estimates:
    """The newest estimates by worker; beyond the bound the worker that reported first is dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        """Rows of estimates in sequence, by worker. As objects they would take seven times the memory."""

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def note(self, batches: Iterable[StepBatch]) -> None:
        """Record batches' estimates; workers that measure their time are dropped."""
        for batch in batches:
            if batch.HasField("estimate"):
                self._take(batch)
            elif batch.worker_id in self._known:
                del self._known[batch.worker_id]

    def _take(self, batch: StepBatch) -> None:
        kept = self._known.get(batch.worker_id)
        if kept is None:
            kept = array("Q")
            put_newest(self._known, batch.worker_id, kept, MAX_WORKERS)
        del kept[: max(len(kept) - (MAX_KEPT - 1) * ROW, 0)]
        ends_ns, found = (batch.covered_from_unix_ns, batch.covered_to_unix_ns), batch.estimate
        kept.extend((*ends_ns, found.busy_ns, found.prefill_ns, found.prefill_low_ns, found.prefill_high_ns))

    def is_unknown(self, worker_id: str) -> bool:
        """Return whether a worker is estimated and its newest time is unknown."""
        kept = self._known.get(worker_id)
        return kept is not None and kept[-ROW] == kept[1 - ROW]

    def bounds(self, worker_ids: Iterable[str], low_ns: int, high_ns: int) -> ShareBounds:
        """Return the bounds over [low, high) of these workers together.

        Servers of one kind err in the same direction, so bounds are summed, not narrowed. All are None if a worker's
        estimates do not reach back to `low_ns`.
        """
        return bounds_of(self.times(name, low_ns, high_ns) for name in worker_ids)

    def times(self, worker_id: str, low_ns: int, high_ns: int) -> EstimatedNs | None:
        """Return a worker's estimated time in [low, high); None if its estimates do not reach back to `low_ns`."""
        kept = self._known.get(worker_id)
        if kept is None:
            return NOTHING
        if len(kept) == MAX_KEPT * ROW and kept[0] > low_ns:
            return None
        busy_ns = prefill_ns = least_ns = most_ns = 0
        for at in range(len(kept) - ROW, -1, -ROW):
            if kept[at + 1] <= low_ns:
                break
            if kept[at] < high_ns:
                busy_ns += kept[at + 2]
                prefill_ns += kept[at + 3]
                least_ns += kept[at + 4]
                most_ns += kept[at + 5]
        return EstimatedNs(busy_ns, prefill_ns, least_ns, most_ns)


def bounds_of(times: Iterable[EstimatedNs | None]) -> ShareBounds:
    """Return the joint bounds of workers; all None if one of them is unknown, or if nothing ran."""
    known: list[EstimatedNs] = []
    for each in times:
        if each is None:
            return UNBOUNDED
        known.append(each)
    busy, prefill, low, high = _sum(known)
    return ShareBounds(prefill / busy, low / busy, min(high / busy, 1.0)) if busy else UNBOUNDED
