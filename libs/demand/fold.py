"""Cumulative records of gateways into time bins: exact in sum, whatever comes late, twice or not at all.

Between two records of a gateway what arrived is their difference, laid evenly over the time between them. A record that
comes late splits such a stretch in two, and one that comes again changes nothing: bins depend on which records came,
not on their order. No clock, no I/O.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from libs.demand.counts import NOTHING, Counts, DemandKey

KEPT_MARKS: Final = 64
"""Records of a gateway that are kept for late ones to fall between: two minutes. What is older than all says nothing
that those do not."""
MAX_GATEWAYS: Final = 256
"""Incarnations that are followed; the longest silent one goes."""
HEARD_NS: Final = 900_000_000_000
"""Over a longer stretch without a record it is not known when what arrived did: its bins count as not heard."""
MOST_SPREAD_BINS: Final = 1440
"""Of a stretch; what arrived in a longer one is laid over its last bins."""
MOST_SPREAD: Final = 16_384
"""Bins times rows of a stretch: what one record costs. One of more rows is laid over fewer bins."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A gateway's totals at a moment."""

    at_ns: int
    rows: Mapping[DemandKey, Counts]


@dataclass(slots=True)
class BinDelta:
    """What is to be added to a bin."""

    rows: dict[DemandKey, Counts] = field(default_factory=dict)
    heard_ns: int = 0
    """Time of gateways, summed over them, of which it is known what arrived in it."""

    def add(self, rows: Mapping[DemandKey, Counts], heard_ns: int, sign: int = 1) -> None:
        """Or take away, with sign -1."""
        for key, counts in rows.items():
            known = self.rows.get(key, NOTHING)
            found = known.plus(counts) if sign > 0 else known.minus(counts)
            if any(found):
                self.rows[key] = found
            else:
                self.rows.pop(key, None)
        self.heard_ns += sign * heard_ns

    def __bool__(self) -> bool:
        return bool(self.rows or self.heard_ns)


Deltas = dict[int, BinDelta]
"""By number of the bin: its start over its length."""
GatewayKey = tuple[str, int]
"""Id and incarnation."""


class DemandFold:
    """Follows gateways; what changes in bins gathers until it is taken."""

    def __init__(self, bin_ns: int, marks: Mapping[GatewayKey, Mark] | None = None) -> None:
        """`marks`: up to where gateways are counted already, as `newest` gave them."""
        self._bin_ns = bin_ns
        self._marks: dict[GatewayKey, list[Mark]] = {key: [mark] for key, mark in (marks or {}).items()}
        self._deltas: Deltas = {}
        self.records = 0
        """That reported something new."""
        self.known_records = 0
        """That did not: repeated, or older than what is kept."""

    def take(self, gateway: GatewayKey, mark: Mark) -> None:
        """Enter a record."""
        # Put last what was heard last.
        marks = self._marks.pop(gateway, None) or [Mark(min(gateway[1], mark.at_ns), {})]
        self._marks[gateway] = marks
        place = bisect_left(marks, mark.at_ns, key=lambda each: each.at_ns)
        if place == 0 or (place < len(marks) and marks[place].at_ns == mark.at_ns):
            self.known_records += 1
            return
        self.records += 1
        if place < len(marks):
            self._lay(marks[place - 1], marks[place], -1)
            self._lay(mark, marks[place], 1)
        self._lay(marks[place - 1], mark, 1)
        marks.insert(place, mark)
        del marks[:-KEPT_MARKS]
        if len(self._marks) > MAX_GATEWAYS:
            del self._marks[next(iter(self._marks))]

    def take_deltas(self) -> Deltas:
        """What has changed since this was called last."""
        deltas, self._deltas = self._deltas, {}
        return deltas

    def give_back(self, deltas: Deltas) -> None:
        """They were not written after all."""
        for number, delta in deltas.items():
            self._at(number).add(delta.rows, delta.heard_ns)

    def newest(self) -> dict[GatewayKey, Mark]:
        """Up to where each gateway is counted."""
        return {gateway: marks[-1] for gateway, marks in self._marks.items()}

    def _at(self, number: int) -> BinDelta:
        return self._deltas.setdefault(number, BinDelta())

    def _lay(self, before: Mark, after: Mark, sign: int) -> None:
        heard = after.at_ns - before.at_ns <= HEARD_NS
        for number, overlap_ns, rows in _shares(before, after, self._bin_ns):
            delta = self._at(number)
            delta.add(rows, overlap_ns if heard else 0, sign)
            if not delta:
                del self._deltas[number]


def _shares(before: Mark, after: Mark, bin_ns: int) -> Iterator[tuple[int, int, dict[DemandKey, Counts]]]:
    """(bin, ns of it, what arrived then); all rows add up to the difference exactly."""
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
