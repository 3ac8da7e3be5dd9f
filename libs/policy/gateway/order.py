"""The order in which waiting requests are bound to workers: those that can still be in time first.

Requests are served first come, first served while all can be in time. Once a cluster has fallen behind, that order
makes everyone equally late, because the head of the queue has always just missed its deadline. So a request that
can no longer have its first token in time waits behind those that can ("late-last") and is bound when there is
room. Late requests still get a share of the prompt tokens, so that no overload starves them.

Once not all requests can be in time, some wait so that more can be ("making room"). On one machine, most jobs are in
time under Moore's rule (J. M. Moore, Management Science 15:1, 1968). Whenever one in the line would be late, the
longest job up to and including it is left out. The jobs left out are about the excess work anyway, so the work done in
time does not suffer. Here all workers of a model are one machine with a measured pace. A tenant leaves out only its own
requests; fairness.py decides between tenants. The classes of a tenant make room for each other while `CLASS_FLOOR` of
their own requests are in time. Below that a class makes room for itself alone.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Final, Generic, NamedTuple, Protocol, TypeVar


class Expiry(Enum):
    """The reason a request stops waiting for workers."""

    # No worker serves its model.
    NO_WORKERS = auto()
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """The bounds of a request's time in the queue."""

    max_wait_ms: int
    no_workers_wait_ms: int
    """The bound while no worker serves the request's model."""

    def ends(self, waited_ns: int, served: Callable[[], bool]) -> Expiry | None:
        """Return the reason why a request has waited too long, or None if it may continue.

        `served` returns whether workers serve its model now; it is called only after `no_workers_wait_ms`.
        """
        if waited_ns >= self.no_workers_wait_ms * 1_000_000 and not served():
            return Expiry.NO_WORKERS
        return Expiry.NO_ROOM if waited_ns >= self.max_wait_ms * 1_000_000 else None


CLASS_FLOOR: Final = 0.6
"""The share of a class's recent requests in time below which it makes no room for other classes."""
# The weight of the newest request in that share.
_NEWEST: Final = 1 / 32
MOST_SHARES: Final = 256
"""The maximum number of classes whose share is known; the one noted least recently is forgotten first."""
# The used share of the measured pace. In the lab, values from 0.7 to 1 do equally well; more makes too many requests
# late.
PACE_COUNTED_ON: Final = 0.85


class QueuedRequest(NamedTuple):
    """A waiting request with its latest start."""

    number: int
    flow: Hashable
    prefill_ns: int
    """The prefill time of the request's prompt on the fastest worker."""
    latest_ns: float
    """The latest start in time; inf if it has no deadline.

    A request without a deadline makes no room: it would never be late, and so would never get a share.
    """
    tenant: Hashable = None
    """The tenant, for whose other classes it may make room; None if only its flow counts."""


def making_room(line: Iterable[QueuedRequest], now_ns: int, pace: float, apart: Container[Hashable] = ()) -> set[int]:
    """Return the numbers of the requests that wait so that others can start in time, in O(n log n).

    `line` is in service order. `pace` is the nanoseconds of `prefill_ns` that workers complete per nanosecond,
    above 0. Flows that are `apart` make room only for their own requests.
    """
    starts_ns, found = float(now_ns), set[int]()
    # By tenant or flow, heaps of (-prefill, number) of the requests that are kept and could wait instead.
    longest: dict[Hashable, list[tuple[int, int]]] = {}
    for number, flow, prefill_ns, latest_ns, tenant in line:
        before_ns, starts_ns = starts_ns, starts_ns + prefill_ns / pace
        if latest_ns == inf:
            continue
        group = flow if tenant is None or flow in apart else tenant
        own = longest.get(group)
        if own is None:
            own = longest[group] = []
        heappush(own, (-prefill_ns, number))
        while before_ns > latest_ns and number not in found:
            minus_ns, other = heappop(own)
            found.add(other)
            starts_ns += minus_ns / pace
            before_ns += minus_ns / pace
    return found


# A request can be in time while the time left exceeds `PREFILL_MARGIN` times its own prefill plus this share of its
# TTFT limit. Without a margin every request is served at its limit, and half of them miss it.
PREFILL_MARGIN: Final = 1.5
LIMIT_MARGIN: Final = 0.15
LATE_SHARE: Final = 1 / 16
"""The share of bound prompt tokens reserved for requests that have been late for `LATE_PATIENCE_NS`."""
LATE_PATIENCE_NS: Final = 10_000_000_000
MOST_LOOKED_AT: Final = 64
"""The maximum number of requests at the front of a line that are checked for making room.

The cost grows with their number and is paid in every binding round of a gateway that has fallen behind.
"""
MOST_GONE: Final = 1024
"""The maximum number of departed requests that are still in the heap of times at which they would turn late."""


class Ordered(Protocol):
    """The attributes of a request that decide its place in the order."""

    @property
    def arrival_unix_ns(self) -> int:
        """The time the client's request arrived at the gateway."""
        ...

    @property
    def ttft_deadline_unix_ns(self) -> int:
        """The time its first token is due; 0 without a deadline."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt, without any output."""
        ...

    @property
    def resumed(self) -> bool:
        """Return whether the request already ran and lost its worker or its place there."""
        ...

    @property
    def batch(self) -> bool:
        """Return whether the request is a batch line, which nobody waits for interactively."""
        ...


W = TypeVar("W", bound=Ordered)


class InTimeShares:
    """The share of each class's requests that left for workers in time, as a moving mean over the latest ones."""

    def __init__(self) -> None:
        # The most recently noted flow comes last.
        self._shares: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def note(self, flow: Hashable, *, in_time: bool) -> None:
        share = self._shares.pop(flow, 1.0)
        self._shares[flow] = share + _NEWEST * (in_time - share)
        if len(self._shares) > MOST_SHARES:
            del self._shares[next(iter(self._shares))]

    def low(self) -> set[Hashable]:
        """Return the flows below `CLASS_FLOOR`."""
        return {flow for flow, share in self._shares.items() if share < CLASS_FLOOR}


class _SortKey(NamedTuple):
    """The sort key of a waiting request; smaller is sooner.

    Requests whose client has seen output come first and batch lines last. Between them tenants take turns.
    """

    batch: bool
    new: bool
    turn: int
    arrival_ns: int
    sequence_id: int


# The key from which batch lines sort, behind late interactive requests.
_FIRST_LINE: Final = _SortKey(True, False, 0, 0, 0)


def hopeless_from_ns(waiting: Ordered, prefill_ns: float) -> float:
    """Return the time from which the first token cannot be expected in time, given the prompt's prefill time.

    It is inf for a request without a deadline, a batch line, and a request that already ran, which is never given
    up.
    """
    deadline_ns = waiting.ttft_deadline_unix_ns
    if not deadline_ns or waiting.batch or waiting.resumed:
        return inf
    limit_ns = max(deadline_ns - waiting.arrival_unix_ns, 0)
    return deadline_ns - PREFILL_MARGIN * prefill_ns - LIMIT_MARGIN * limit_ns


class Line(Generic[W]):
    """The requests waiting for one model.

    Adding, removing and turning late take O(log n) comparisons.
    """

    def __init__(self) -> None:
        self._requests: dict[int, tuple[_SortKey, W, Hashable, Hashable]] = {}
        self._hopeful: list[_SortKey] = []
        self._late: list[_SortKey] = []
        # By sequence id; only requests passed to `judge`.
        self._queued: dict[int, QueuedRequest] = {}
        # A heap of (hopeless from, sequence id) that may still hold requests that have left.
        self._turning: list[tuple[float, int]] = []
        self.hopeful_tokens = 0
        """The prompt tokens of requests that could still be in time at the last call of `look`."""
        # Prefill time of the judged requests that could still be in time at the last call of `look`.
        self._hopeful_ns = 0
        # Tokens that late requests may still use: their share of the prompt tokens bound while they wait.
        self._owed_tokens = 0.0
        self._in_time = InTimeShares()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def late(self) -> int:
        """Requests that could no longer be in time at the last call of `look`."""
        return len(self._late)

    def add(self, sequence_id: int, waiting: W, turn: int = 0, flow: Hashable = None, tenant: Hashable = None) -> None:
        """Add a request, which counts as in time until `judge` sets its limit.

        `turn` comes from fairness.py. Requests of one `flow` make room for each other. Requests of one `tenant` do so
        too while `CLASS_FLOOR` of their flow's requests are in time.
        """
        key = _SortKey(waiting.batch, not waiting.resumed, turn, waiting.arrival_unix_ns, sequence_id)
        self._requests[sequence_id] = key, waiting, flow, tenant
        insort(self._hopeful, key)
        self.hopeful_tokens += waiting.prompt_tokens

    def judge(self, sequence_id: int, hopeless_ns: float, prefill_ns: int = 0) -> None:
        """Set the time from which a waiting request is hopeless (see `hopeless_from_ns`), and its prefill time.

        Call this once per request.
        """
        found = self._requests.get(sequence_id)
        if found is None:
            return
        self._queued[sequence_id] = QueuedRequest(sequence_id, found[2], prefill_ns, hopeless_ns, found[3])
        self._hopeful_ns += prefill_ns
        if hopeless_ns == inf:
            return
        heappush(self._turning, (hopeless_ns, sequence_id))
        if len(self._turning) > MOST_GONE + 2 * len(self._queued):
            self._turning = [
                (queued.latest_ns, each) for each, queued in self._queued.items() if queued.latest_ns != inf
            ]
            heapify(self._turning)

    def remove(self, sequence_id: int) -> bool:
        found = self._requests.pop(sequence_id, None)
        if found is None:
            return False
        key, waiting, _, _ = found
        queued = self._queued.pop(sequence_id, None)
        if _discard(self._hopeful, key):
            self._uncount_hopeful(waiting, queued)
        else:
            _discard(self._late, key)
        if not self._late:
            self._owed_tokens = 0.0
        return True

    def _uncount_hopeful(self, waiting: W, queued: QueuedRequest | None) -> None:
        self.hopeful_tokens -= waiting.prompt_tokens
        self._hopeful_ns -= queued.prefill_ns if queued else 0

    def bound(self, sequence_id: int) -> int:
        """Account for a request about to leave for workers, and return its prefill nanoseconds; 0 if it was not
        judged.

        A late request uses up tokens owed to late requests; any other adds their share of its tokens.
        """
        found, queued = self._requests.get(sequence_id), self._queued.get(sequence_id)
        prefill_ns, can_be_late = (queued.prefill_ns, queued.latest_ns != inf) if queued else (0, False)
        if found is None:
            return prefill_ns
        key, waiting, flow, _ = found
        if self._late and _index(self._late, key) is not None:
            self._owed_tokens = max(self._owed_tokens - waiting.prompt_tokens, 0.0)
            return prefill_ns
        if self._late:
            self._owed_tokens += LATE_SHARE * waiting.prompt_tokens
        if can_be_late:
            self._in_time.note(flow, in_time=True)
        return prefill_ns

    def look(self, now_ns: int) -> None:
        """Move requests that can no longer be in time to the late ones."""
        turning = self._turning
        while turning and turning[0][0] <= now_ns:
            _, sequence_id = heappop(turning)
            found = self._requests.get(sequence_id)
            if found is not None and _discard(self._hopeful, found[0]):
                insort(self._late, found[0])
                self._in_time.note(found[2], in_time=False)
                self._uncount_hopeful(found[1], self._queued.get(sequence_id))

    def in_order(self, now_ns: int, pace: float | None = None) -> Iterator[W]:
        """Yield the requests in the order they are bound. The line must not change during iteration.

        `pace` is the one of `making_room`. If it is None, no request makes room, because the pace is unknown or no
        prompt can start.
        """
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
        for key in chain(going, behind, aside, self._late, lines):
            if key is not first:
                yield self._requests[key.sequence_id][1]

    def _making_room(self, front: list[_SortKey], now_ns: int, pace: float | None) -> set[int]:
        """Return the sequence ids of requests at the front that wait so that others can be in time."""
        turning = self._turning
        while turning and turning[0][1] not in self._requests:
            heappop(turning)
        if not pace or not turning:
            return set()
        pace *= PACE_COUNTED_ON
        if now_ns + self._hopeful_ns / pace <= turning[0][0]:
            return set()
        queued = self._queued
        line = [queued[each.sequence_id] for each in front if each.sequence_id in queued]
        return making_room(line, now_ns, pace, self._in_time.low())

    def head_deadline_ns(self, now_ns: int) -> int:
        """Return the deadline of the first request that can be in time, or 0 if there is none."""
        self.look(now_ns)
        return self._requests[self._hopeful[0].sequence_id][1].ttft_deadline_unix_ns if self._hopeful else 0

    def _overdue(self, now_ns: int) -> _SortKey | None:
        """Return the oldest late request if it has been late for `LATE_PATIENCE_NS` and the owed tokens cover its
        prompt.
        """
        if not self._late:
            return None
        oldest = self._late[0]
        if now_ns - self._queued[oldest.sequence_id].latest_ns < LATE_PATIENCE_NS:
            return None
        return oldest if self._owed_tokens >= self._requests[oldest.sequence_id][1].prompt_tokens else None


def _discard(keys: list[_SortKey], key: _SortKey) -> bool:
    index = _index(keys, key)
    if index is None:
        return False
    del keys[index]
    return True


def _index(keys: list[_SortKey], key: _SortKey) -> int | None:
    index = bisect_left(keys, key)
    return index if index < len(keys) and keys[index] == key else None
