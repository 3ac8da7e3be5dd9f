"""The record of an engine's steps, written by the engine's thread and cut into batches by another, without locks.

With asynchronous scheduling and with pipeline parallelism, several steps are in flight. A step begins when it is
decided, but not before the previous one has ended. It ends when its output arrives.
"""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

from .wire import Batch, Load, Span, Step

T = TypeVar("T")

MAX_STEPS = 16_384
"""The maximum number of steps that wait to be cut. Beyond it all of them are dropped, and their time is unknown."""
MAX_SPANS = 4_096
LONGEST_NS = 1_000_000_000
"""The longest time that one batch covers."""


class StepRecorder:
    """The steps, KV waits and load of one engine. Only the engine's thread may call methods other than `cut`."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._in_flight: deque[tuple[Step, int]] = deque()
        """The work of each step in flight, with the time of its decision."""
        self._ended_ns = 0
        self._running: Step | None = None
        """The oldest step in flight, with its start and 0 as its end; None if none is in flight."""
        self._steps: deque[Step] = deque()
        self._waits: deque[Span] = deque(maxlen=MAX_SPANS)
        self._waits_since_ns = 0
        self._dummies: deque[Span] = deque(maxlen=MAX_SPANS)
        self._dummy_steps = 0
        self._known_from_ns = self._overflows = 0
        self.load = Load()
        self.broken = False
        """True once an error has ended the recording. No time is covered after it."""
        # The fields below belong to the thread that cuts.
        self._covered_to_ns = clock()
        self._sequence = 0
        self._late: list[Step] = []
        self._announced_ns = 0
        self._open_waits: list[Span] = []

    # ------------------------------------------------------------ the engine's thread

    def decided(self, work: Step) -> None:
        """Record the decision of a step. The times in `work` are ignored."""
        now_ns = self._clock()
        self._end_wait(now_ns)
        self._in_flight.append((work, now_ns))
        if len(self._in_flight) == 1:
            self._running = work._replace(start_ns=max(now_ns, self._ended_ns), end_ns=0)

    def ended(self) -> None:
        """Record the end of the oldest step in flight."""
        if self._running is None:
            return
        now_ns = self._clock()
        if len(self._steps) >= MAX_STEPS:
            self._steps.clear()
            self._known_from_ns = now_ns
            self._overflows += 1
        # The step is appended before `_running` changes, so that the other thread always finds it in one of the two.
        self._steps.append(self._running._replace(end_ns=now_ns))
        self._ended_ns = now_ns
        self._in_flight.popleft()
        if self._in_flight:
            work, decided_ns = self._in_flight[0]
            self._running = work._replace(start_ns=max(decided_ns, now_ns), end_ns=0)
        else:
            self._running = None

    def nothing_to_compute(self, awaiting_kv: bool) -> None:
        """Record that nothing could be scheduled, and whether a request waits for KV of another engine."""
        if self._in_flight:
            return
        if not awaiting_kv:
            self._end_wait(self._clock())
        elif not self._waits_since_ns:
            self._waits_since_ns = self._clock()

    def dummy(self, start_ns: int, end_ns: int) -> None:
        """Record a step without requests, which a rank runs because another rank has work."""
        self._dummies.append(Span(start_ns, end_ns))
        self._dummy_steps += 1

    def _end_wait(self, now_ns: int) -> None:
        if self._waits_since_ns:
            self._waits.append(Span(self._waits_since_ns, now_ns))
            self._waits_since_ns = 0

    # ------------------------------------------------------------ the cutter's thread

    def cut(self, dropped_batches: int = 0, *, last: bool = False) -> list[Batch]:
        """Return batches that cover the time from the last one to now, each of at most `LONGEST_NS`.

        Batches are adjacent in time, except where steps were dropped.
        """
        # The clock is read before the state, so that a step that begins or ends in between belongs to the next batch.
        now_ns, running, waits_since_ns = self._clock(), self._running, self._waits_since_ns
        steps = self._late + _drained(self._steps)
        from_ns = max(self._covered_to_ns, self._known_from_ns)
        if now_ns <= from_ns or self.broken:
            self._late = steps
            return []
        waits = self._open_waits + _drained(self._waits)
        dummies = tuple(_drained(self._dummies))
        if running is not None and self._is_news(running, steps, now_ns):
            self._announced_ns = running.start_ns
            steps.append(running)
        ongoing = [Span(waits_since_ns, now_ns)] if waits_since_ns and not any(
            each.start_ns == waits_since_ns for each in waits
        ) else []  # fmt: skip
        found: list[Batch] = []
        begin_ns = 0  # the first batch includes steps that began before it
        for low_ns, high_ns in pairwise([*range(from_ns, now_ns, LONGEST_NS), now_ns]):
            self._sequence += 1
            begun = [each for each in steps if begin_ns <= each.start_ns < high_ns]
            begin_ns = high_ns
            batch = Batch(
                self._sequence, low_ns, high_ns, begun, _within([*waits, *ongoing], low_ns, high_ns), self.load
            )
            found.append(batch._replace(dropped_batches=dropped_batches + self._overflows))
        found[-1] = found[-1]._replace(dummy_steps=self._dummy_steps, dummies=dummies, last=last)
        self._late = [each for each in steps if each.start_ns >= now_ns]
        self._open_waits = [each for each in waits if each.end_ns > now_ns]
        self._covered_to_ns = now_ns
        return found

    def _is_news(self, running: Step, steps: list[Step], now_ns: int) -> bool:
        """Return whether to announce a running step. Each is announced once, and only while it runs."""
        known = running.start_ns == self._announced_ns or any(each.start_ns == running.start_ns for each in steps)
        return running.start_ns < now_ns and not known


def _drained(found: "deque[T]") -> list[T]:
    """Remove and return all entries, while another thread may append further ones."""
    taken: list[T] = []
    while found:
        try:
            taken.append(found.popleft())
        except IndexError:  # the engine's thread has dropped them
            break
    return taken


def _within(spans: list[Span], low_ns: int, high_ns: int) -> list[Span]:
    cut = (Span(max(start, low_ns), min(end, high_ns)) for start, end in spans)
    return [each for each in cut if each.start_ns < each.end_ns]
