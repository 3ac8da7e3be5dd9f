"""Conversion of demand totals and capacity plans to and from protobuf, and the summing of totals in time bins."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from math import isfinite
from typing import Final

from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandCount, DemandTotals, PoolNeed
from libs.demand.counts import MAX_ROWS, NOTHING, OTHER, Counts, DemandKey
from libs.policy.capacity import MOST_WORKERS, PHASES, CapacityPlan, Phase, PoolHour

# The difference between two records of a gateway is spread evenly over the time between them. A late record splits such
# a stretch in two, and a repeated one changes nothing. The bins therefore depend on the records but not on their order.
# There is no clock and no I/O.


# The records of about two minutes are kept for each gateway, so that late ones find their place. Older ones are
# ignored.
KEPT_MARKS: Final = 64
# The incarnation without a record for longest is dropped first.
MAX_GATEWAYS: Final = 256
# The times of arrivals are unknown if a gateway sent no record for longer than this. The bins are then not covered.
MAX_COVERED_NS: Final = 900_000_000_000
# The arrivals in a longer stretch are spread over its last bins only.
MOST_SPREAD_BINS: Final = 1440
# The bound on bins times rows of a stretch, which limits the cost of one record. With many rows, fewer bins are used.
MOST_SPREAD: Final = 16_384


@dataclass(frozen=True, slots=True)
class Mark:
    at_ns: int
    rows: Mapping[DemandKey, Counts]


@dataclass(slots=True)
class BinDelta:
    """The counts and the covered time to add to a bin."""

    rows: dict[DemandKey, Counts] = field(default_factory=dict)
    covered_ns: int = 0
    """The time for which arrivals in the bin are known, summed over gateways."""
    unknown: frozenset[str] = frozenset()
    """The models whose arrivals in the bin are only partly known."""

    def add(self, rows: Mapping[DemandKey, Counts], covered_ns: int, sign: int = 1) -> None:
        """Add counts and time. A `sign` of -1 subtracts them."""
        for key, counts in rows.items():
            known = self.rows.get(key, NOTHING)
            found = known.plus(counts) if sign > 0 else known.minus(counts)
            if any(found):
                self.rows[key] = found
            else:
                self.rows.pop(key, None)
        self.covered_ns += sign * covered_ns

    def __bool__(self) -> bool:
        return bool(self.rows or self.covered_ns)


Deltas = dict[int, BinDelta]
"""The changes of bins by bin number, which is the start of a bin divided by its length."""
GatewayKey = tuple[str, int]
"""The id of a gateway and the start time of its incarnation."""


class DemandFold:
    """The latest records of each gateway, and the changes of bins that have not been collected."""

    def __init__(self, bin_ns: int, marks: Mapping[GatewayKey, Mark] | None = None) -> None:
        """Create the fold. `marks` contains the last record of each gateway that is already counted; see `newest`."""
        self._bin_ns = bin_ns
        self._marks: dict[GatewayKey, list[Mark]] = {key: [mark] for key, mark in (marks or {}).items()}
        self._deltas: Deltas = {}
        self.records = 0
        """The number of records that were new."""
        self.known_records = 0
        """The number of records that were repeated, or older than all kept ones."""

    def take(self, gateway: GatewayKey, mark: Mark) -> None:
        """Add a record of a gateway to the bins."""
        # The gateway with the latest record comes last, so that silent gateways are dropped first.
        marks = self._marks.pop(gateway, None) or [Mark(min(gateway[1], mark.at_ns), {})]
        self._marks[gateway] = marks
        index = bisect_left(marks, mark.at_ns, key=lambda each: each.at_ns)
        if index == 0 or (index < len(marks) and marks[index].at_ns == mark.at_ns):
            self.known_records += 1
            return
        self.records += 1
        if index < len(marks):
            self._lay(marks[index - 1], marks[index], -1)
            self._lay(mark, marks[index], 1)
        self._lay(marks[index - 1], mark, 1)
        marks.insert(index, mark)
        del marks[:-KEPT_MARKS]
        if len(self._marks) > MAX_GATEWAYS:
            del self._marks[next(iter(self._marks))]

    def take_deltas(self) -> Deltas:
        """Return the changes since the last call."""
        deltas, self._deltas = self._deltas, {}
        return deltas

    def add(self, deltas: Deltas) -> None:
        """Add changes to those that `take_deltas` returns next.

        They come from elsewhere, or could not be written.
        """
        for number, delta in deltas.items():
            found = self._at(number)
            found.add(delta.rows, delta.covered_ns)
            found.unknown |= delta.unknown

    def newest(self) -> dict[GatewayKey, Mark]:
        """Return the last counted record of each gateway."""
        return {gateway: marks[-1] for gateway, marks in self._marks.items()}

    def _at(self, number: int) -> BinDelta:
        return self._deltas.setdefault(number, BinDelta())

    def _lay(self, before: Mark, after: Mark, sign: int) -> None:
        covered = after.at_ns - before.at_ns <= MAX_COVERED_NS
        for number, overlap_ns, rows in _shares(before, after, self._bin_ns):
            delta = self._at(number)
            delta.add(rows, overlap_ns if covered else 0, sign)
            if not delta:
                del self._deltas[number]


def _shares(before: Mark, after: Mark, bin_ns: int) -> Iterator[tuple[int, int, dict[DemandKey, Counts]]]:
    """Yield, for each bin of a stretch, its number, the ns of the stretch within it, and its arrivals.

    The arrivals add up to the difference between the records exactly.
    """
    more = {}
    for key, counts in after.rows.items():
        grown = Counts(*(max(each, 0) for each in counts.minus(before.rows.get(key, NOTHING))))
        if any(grown):
            more[key] = grown
    bins = min(MOST_SPREAD_BINS, MOST_SPREAD // max(len(more), 1))
    start_ns = max(before.at_ns, after.at_ns - bins * bin_ns)
    span_ns = after.at_ns - start_ns
    if span_ns <= 0:
        return
    done: dict[DemandKey, Counts] = {}
    for number in range(start_ns // bin_ns, (after.at_ns - 1) // bin_ns + 1):
        end_ns = min((number + 1) * bin_ns, after.at_ns)
        passed_ns = end_ns - start_ns
        rows = {}
        for key, counts in more.items():
            so_far = Counts(*(each * passed_ns // span_ns for each in counts))
            share = so_far.minus(done.get(key, NOTHING))
            if any(share):
                rows[key] = share
            done[key] = so_far
        yield number, end_ns - max(number * bin_ns, start_ns), rows


MAX_NAME_CHARS: Final = 200


def totals_message(
    gateway: GatewayKey,
    at_ns: int,
    rows: Mapping[DemandKey, Counts],
    queue_full: Mapping[DemandKey, int] | None = None,
    *,
    last: bool = False,
) -> DemandTotals:
    """Encode the totals of a gateway. `queue_full` contains the refusals by a full queue, by row."""
    full = queue_full or {}
    counts = [
        DemandCount(
            model=key.model,
            service_class=key.service_class,
            tenant=key.tenant,
            queue_full=full.get(key, 0),
            **row._asdict(),
        )
        for key, row in rows.items()
    ]
    return DemandTotals(gateway_id=gateway[0], incarnation=gateway[1], told_unix_ns=at_ns, counts=counts, last=last)


def mark_of(message: DemandTotals) -> tuple[GatewayKey, Mark]:
    """Decode the totals of a gateway. Names that are too long are cut."""
    rows: dict[DemandKey, Counts] = {}
    for each in message.counts[: MAX_ROWS * 2]:
        names = (each.model, each.service_class, each.tenant)
        key = DemandKey(*(name[:MAX_NAME_CHARS] or OTHER for name in names))
        rows[key] = Counts(*(getattr(each, name) for name in Counts._fields))
    return (message.gateway_id, message.incarnation), Mark(message.told_unix_ns, rows)


# The bound on the stretches of a plan: six weeks of quarter hours.
MAX_STRETCHES: Final = 4_096


def plan_message(plan: CapacityPlan, model: str, metrics_id: str, made_unix_ns: int) -> PlanMessage:
    """Encode a plan in Unix seconds. Its stretches must follow each other without gaps."""
    return PlanMessage(
        metrics_id=metrics_id,
        model=model,
        made_unix_ns=made_unix_ns,
        start_unix_s=plan.starts_s[0] if plan.starts_s else 0.0,
        step_s=plan.step_s,
        confidence=plan.confidence,
        spare_workers=plan.spare,
        **{phase: _need(plan, phase) for phase in PHASES},
    )


def _need(plan: CapacityPlan, phase: Phase) -> PoolNeed:
    pool = plan.pools[phase]
    return PoolNeed(
        surely=[each.surely for each in pool],
        p50=[each.p50 for each in pool],
        p95=[each.p95 for each in pool],
        asked=[each.planned for each in pool],
        short=[each.short for each in pool],
        there=plan.there.get(phase),
    )


def plan_of(message: PlanMessage) -> CapacityPlan:
    """Decode a plan. Raise ValueError if the message is invalid."""
    count = len(message.prefill.asked)
    if not 0 < count <= MAX_STRETCHES:
        raise ValueError(f"a plan has 1 to {MAX_STRETCHES} stretches, this one {count}")
    if not (isfinite(message.start_unix_s) and isfinite(message.step_s) and message.step_s > 0):
        raise ValueError(f"a plan begins at {message.start_unix_s} s in steps of {message.step_s} s")
    pools: dict[Phase, tuple[PoolHour, ...]] = {}
    there: dict[Phase, int] = {}
    for phase in PHASES:
        need: PoolNeed = getattr(message, phase)
        columns = need.surely, need.p50, need.p95, need.asked, need.short or repeat(0.0, count)
        pools[phase] = tuple(PoolHour(*each) for each in zip(*columns, strict=True))
        if len(pools[phase]) != count or max(max(each.planned, each.p95) for each in pools[phase]) > MOST_WORKERS:
            raise ValueError(f"{phase} has another number of stretches, or more than {MOST_WORKERS} workers")
        if need.HasField("there"):
            there[phase] = need.there
    starts = tuple(message.start_unix_s + at * message.step_s for at in range(count))
    return CapacityPlan(starts, message.step_s, pools, there, message.confidence, message.spare_workers)
