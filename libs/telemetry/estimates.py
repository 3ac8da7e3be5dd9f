"""Bounds of prefill's share of workers whose times are estimated. Pure."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.policy.newest import put_newest
from libs.telemetry.rollups import MAX_WORKERS

MAX_KEPT: Final = 32
"""Estimates kept of each worker: a quarter of a minute at two a second."""


class ShareBounds(NamedTuple):
    """Bounds of prefill's share of busy time, and the share; all None where nothing ran, or too long ago."""

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


class _Estimate(NamedTuple):
    from_ns: int
    to_ns: int
    time: EstimatedNs


def _sum(times: Iterable[EstimatedNs]) -> EstimatedNs:
    return EstimatedNs(*map(sum, zip(NOTHING, *times, strict=True)))


class Estimates:
    """The newest estimates by worker; beyond the bound the worker that reported first is dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, deque[_Estimate]] = OrderedDict()

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def note(self, batches: Iterable[StepBatch]) -> None:
        """Record batches' estimates; a worker that measures its time is dropped."""
        for batch in batches:
            if batch.HasField("estimate"):
                self._take(batch)
            elif batch.worker_id in self._known:
                del self._known[batch.worker_id]

    def _take(self, batch: StepBatch) -> None:
        kept = self._known.get(batch.worker_id)
        if kept is None:
            kept = deque(maxlen=MAX_KEPT)
            put_newest(self._known, batch.worker_id, kept, MAX_WORKERS)
        found = batch.estimate
        time = EstimatedNs(found.busy_ns, found.prefill_ns, found.prefill_low_ns, found.prefill_high_ns)
        kept.append(_Estimate(batch.covered_from_unix_ns, batch.covered_to_unix_ns, time))

    def is_unknown(self, worker_id: str) -> bool:
        """Report whether a worker is estimated and nothing is known of its newest time."""
        kept = self._known.get(worker_id)
        return kept is not None and kept[-1].from_ns == kept[-1].to_ns

    def bounds(self, worker_ids: Iterable[str], low_ns: int, high_ns: int) -> ShareBounds:
        """Return the bounds over [low, high) of these workers together.

        The errors of servers of one kind go the same way, so bounds are summed and not narrowed. All None if a
        worker's estimates do not reach back to `low_ns`.
        """
        return bounds_of(self.times(name, low_ns, high_ns) for name in worker_ids)

    def times(self, worker_id: str, low_ns: int, high_ns: int) -> EstimatedNs | None:
        """Return a worker's estimated time in [low, high); None if its estimates do not reach back to `low_ns`."""
        kept: Sequence[_Estimate] = self._known.get(worker_id, ())
        if len(kept) == MAX_KEPT and kept[0].from_ns > low_ns:
            return None
        recent = takewhile(lambda each: each.to_ns > low_ns, reversed(kept))
        return _sum(each.time for each in recent if each.from_ns < high_ns)


def bounds_of(times: Iterable[EstimatedNs | None]) -> ShareBounds:
    """Return the bounds of workers together; all None if one of them is not known, or if nothing ran."""
    known: list[EstimatedNs] = []
    for each in times:
        if each is None:
            return UNBOUNDED
        known.append(each)
    busy, prefill, low, high = _sum(known)
    return ShareBounds(prefill / busy, low / busy, min(high / busy, 1.0)) if busy else UNBOUNDED
