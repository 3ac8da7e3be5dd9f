"""The order in which waiting requests are bound to workers: whoever can still be in time first. Pure.

First come, first served, so long as all can be in time. Once a cluster has fallen behind, that order makes everyone
late by as much: the head of the queue is always the one that has just missed its deadline. So a request that can
no longer have its first token in time waits behind those that can ("late-last"), and goes when there is room for it.
Before that it may have to make room: see making_room.py. A share of the prompt tokens is theirs all the same, so that
no overload starves them.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from libs.policy.queue.making_room import PACE_COUNTED_ON, Due, making_room

PREFILL_MARGIN: Final = 1.5
LIMIT_MARGIN: Final = 0.15
"""A request can be in time while the time left exceeds `PREFILL_MARGIN` times its own prefill, plus this share of its
TTFT limit. Without a margin every request is served at the limit, and half of them miss it."""
LATE_SHARE: Final = 1 / 16
"""Of prompt tokens bound while late requests wait that have been late for `LATE_PATIENCE_NS`."""
LATE_PATIENCE_NS: Final = 10_000_000_000
MOST_LOOKED_AT: Final = 64
"""Requests at the front of a line that may have to make room; a look costs by their number, in every turn of a gateway
that has fallen behind."""
MOST_GONE: Final = 1024
"""Requests that have left and are still remembered with the time at which they would have turned late."""


class Ordered(Protocol):
    """What order is decided by."""

    @property
    def arrival_unix_ns(self) -> int:
        """When the client's request came."""
        ...

    @property
    def ttft_deadline_unix_ns(self) -> int:
        """When its first token is due; 0: never."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether it ran already and lost its worker, or its place there."""
        ...

    @property
    def batch(self) -> bool:
        """Whether nobody waits for it in person."""
        ...


W = TypeVar("W", bound=Ordered)


class _Place(NamedTuple):
    """Smaller is sooner: what its client has seen start comes before all others, batch lines last; between them tenants
    take turns."""

    batch: bool
    new: bool
    turn: int
    arrival_ns: int
    sequence_id: int


_FIRST_LINE: Final = _Place(True, False, 0, 0, 0)
"""Where lines of batch jobs begin: behind late people."""


def hopeless_from_ns(waiting: Ordered, prefill_ns: float) -> float:
    """From when on its first token cannot be expected in time, if its prompt alone takes `prefill_ns`; inf: never.

    What ran already is never given up, and nobody waits for a line of a batch job.
    """
    deadline_ns = waiting.ttft_deadline_unix_ns
    if not deadline_ns or waiting.batch or waiting.resumed:
        return inf
    limit_ns = max(deadline_ns - waiting.arrival_unix_ns, 0)
    return deadline_ns - PREFILL_MARGIN * prefill_ns - LIMIT_MARGIN * limit_ns


class Line(Generic[W]):
    """Requests that wait for one model. Adding, removing and turning late take O(log n) comparisons."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[_Place, W, Hashable]] = {}
        self._hopeful: list[_Place] = []
        self._late: list[_Place] = []
        self._due: dict[int, Due] = {}
        """Of those that were judged."""
        self._turning: list[tuple[float, int]] = []
        """A heap of (hopeless from, sequence id); what has left may still be in it."""
        self.hopeful_tokens = 0
        """Prompt tokens of those that can be in time, as of the last look."""
        self._hopeful_ns = 0
        """Prefill of those that were judged."""
        self._owed_tokens = 0.0
        """What is due to late ones of what was bound while they wait."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def late(self) -> int:
        """Requests that can no longer be in time, as of the last look."""
        return len(self._late)

    def add(self, sequence_id: int, waiting: W, turn: int = 0, flow: Hashable = None) -> None:
        """Let it wait; it can be in time until `judge` says otherwise. `turn`: see fairness.py; `flow`: who makes room
        for one another."""
        place = _Place(waiting.batch, not waiting.resumed, turn, waiting.arrival_unix_ns, sequence_id)
        self._requests[sequence_id] = place, waiting, flow
        insort(self._hopeful, place)
        self.hopeful_tokens += waiting.prompt_tokens

    def judge(self, sequence_id: int, hopeless_ns: float, prefill_ns: int = 0) -> None:
        """From when on one that waits cannot be in time: see `hopeless_from_ns`; and how long its prompt takes. Once
        for each."""
        found = self._requests.get(sequence_id)
        if found is None:
            return
        self._due[sequence_id] = Due(sequence_id, found[2], prefill_ns, hopeless_ns)
        self._hopeful_ns += prefill_ns
        if hopeless_ns == inf:
            return
        heappush(self._turning, (hopeless_ns, sequence_id))
        if len(self._turning) > MOST_GONE + 2 * len(self._due):
            self._turning = [(due.latest_ns, each) for each, due in self._due.items() if due.latest_ns != inf]
            heapify(self._turning)

    def remove(self, sequence_id: int) -> bool:
        """Whether it was waiting; it is not any more."""
        found = self._requests.pop(sequence_id, None)
        if found is None:
            return False
        place, waiting, _ = found
        due = self._due.pop(sequence_id, None)
        if _discard(self._hopeful, place):
            self._hopes_less(waiting, due)
        else:
            _discard(self._late, place)
        if not self._late:
            self._owed_tokens = 0.0
        return True

    def _hopes_less(self, waiting: W, due: Due | None) -> None:
        self.hopeful_tokens -= waiting.prompt_tokens
        self._hopeful_ns -= due.prefill_ns if due else 0

    def bound(self, sequence_id: int) -> int:
        """It is about to leave for workers: late ones are owed their share of it, or have had it. Its prefill in
        nanoseconds, 0 where it was not judged."""
        found, due = self._requests.get(sequence_id), self._due.get(sequence_id)
        if found is not None and self._late:
            place, waiting, _ = found
            if _index(self._late, place) is None:
                self._owed_tokens += LATE_SHARE * waiting.prompt_tokens
            else:
                self._owed_tokens = max(self._owed_tokens - waiting.prompt_tokens, 0.0)
        return due.prefill_ns if due else 0

    def look(self, now_ns: int) -> None:
        """Set those back that can no longer be in time."""
        turning = self._turning
        while turning and turning[0][0] <= now_ns:
            _, sequence_id = heappop(turning)
            found = self._requests.get(sequence_id)
            if found is not None and _discard(self._hopeful, found[0]):
                insort(self._late, found[0])
                self._hopes_less(found[1], self._due.get(sequence_id))

    def in_order(self, now_ns: int, pace: float | None = None) -> Iterator[W]:
        """The next one first. Whoever iterates may not change the line meanwhile. `pace`: see `making_room`; None:
        nobody is to make room, as it is not known, or no prompt can start."""
        self.look(now_ns)
        first = self._overdue(now_ns)
        if first is not None:
            yield self._requests[first.sequence_id][1]
        hopeful, people = self._hopeful, bisect_left(self._hopeful, _FIRST_LINE)
        front = hopeful[: min(people, MOST_LOOKED_AT)]
        numbers = self._making_room(front, now_ns, pace)
        aside = [each for each in front if each.sequence_id in numbers] if numbers else []
        going = [each for each in front if each.sequence_id not in numbers] if numbers else front
        behind, lines = islice(hopeful, len(front), people), islice(hopeful, people, None)
        for place in chain(going, behind, aside, self._late, lines):
            if place is not first:
                yield self._requests[place.sequence_id][1]

    def _making_room(self, front: list[_Place], now_ns: int, pace: float | None) -> set[int]:
        """Sequence ids of those of the line's front that wait so that others can be in time."""
        turning = self._turning
        while turning and turning[0][1] not in self._requests:
            heappop(turning)
        if not pace or not turning:
            return set()
        pace *= PACE_COUNTED_ON
        if now_ns + self._hopeful_ns / pace <= turning[0][0]:
            return set()
        due = self._due
        return making_room([due[each.sequence_id] for each in front if each.sequence_id in due], now_ns, pace)

    def head_deadline_ns(self, now_ns: int) -> int:
        """Deadline of the first one that can be in time; 0 where none can, who are in no hurry any more."""
        self.look(now_ns)
        return self._requests[self._hopeful[0].sequence_id][1].ttft_deadline_unix_ns if self._hopeful else 0

    def _overdue(self, now_ns: int) -> _Place | None:
        """The oldest late one, if it has been late for long and what late ones are owed is enough for it."""
        if not self._late:
            return None
        oldest = self._late[0]
        if now_ns - self._due[oldest.sequence_id].latest_ns < LATE_PATIENCE_NS:
            return None
        return oldest if self._owed_tokens >= self._requests[oldest.sequence_id][1].prompt_tokens else None


def _discard(places: list[_Place], place: _Place) -> bool:
    index = _index(places, place)
    if index is None:
        return False
    del places[index]
    return True


def _index(places: list[_Place], place: _Place) -> int | None:
    index = bisect_left(places, place)
    return index if index < len(places) and places[index] == place else None
