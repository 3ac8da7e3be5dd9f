"""A worker's steps, packed so that those of hundreds of workers fit in memory, and their phases.

A step takes 72 bytes, or 24 if the work of all steps is unknown.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libs.contracts.step_row import StepRow
from libs.perfmodel.utilisation import Compute, Effort, effort_of
from libs.policy.step_time import StepWork

SHARE_BITS: Final = 23
"""The unit of a step's prefill part is 2**-23 of it. A product with 17 minutes in ns still fits an int64."""
FULL_SHARE: Final = 1 << SHARE_BITS
FEW_STEPS: Final = 32
"""The number of steps up to which a loop is cheaper than arrays: 10 us instead of 45 for a window of 100 ms."""
_TURN_NS: Final = 1 << (61 - SHARE_BITS)
"""The modulus, under five minutes, of times since a step's start. It lets products with prefill parts fit an int64."""


class StepCounts(NamedTuple):
    """The work of a step: columns of telemetry in the order of `StepWork`.

    All are 0 if the work is unknown, for example for a step that was cut off.
    """

    prefill_tokens: int = 0
    prefill_sequences: int = 0
    prefill_context_tokens: int = 0
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    prefill_squared_tokens: int = 0


UNKNOWN: Final = StepCounts()
_TOKENS: Final = StepCounts._fields.index("prefill_tokens")
_DECODES: Final = StepCounts._fields.index("decode_sequences")
COUNTS: Final = slice(StepRow._fields.index(StepCounts._fields[0]), StepRow._fields.index(StepCounts._fields[-1]) + 1)
"""The columns of `StepCounts` within a `StepRow`."""


class FinishedSteps(NamedTuple):
    """Columns of the steps that were reported with their end and their work."""

    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    prefill_shares: NDArray[np.float64]
    """[steps] float64: the prefill part of each step, 0..1."""
    counts: NDArray[np.float64]
    """[`StepCounts`, steps] float64: the work of each step, one row per field."""


@dataclass(frozen=True, slots=True)
class RanStep:
    """A step as far as it is known to have run: [start, end) in Unix ns."""

    start_ns: int
    end_ns: int
    prefill_share: int
    """The prefill part of the step's time, 0..`FULL_SHARE`."""
    counts: StepCounts
    running: bool
    """True if the step's end is not known yet."""


RunningStep = tuple[int, int]
"""A pair (start, prefill share) of a step that has been announced and has not ended."""


class StepLog:
    """Steps keyed by start. Announcements are replaced by the finished step, and replays change nothing."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._shares = array("q")
        self._counts = [array("Q") for _ in StepCounts._fields]
        """The columns of `StepCounts`; empty while `_counted` is False."""
        self._counted = False
        """True once the work of any step is known. The work of estimated steps never is."""
        self._announced: set[int] = set()
        """Starts of steps whose end is unknown; their entry in `_ends` is the time up to which they are known to have
        run.
        """

    def __len__(self) -> int:
        return len(self._starts)

    def add(
        self, start: int, end: int, prefill_share: int, counts: StepCounts = UNKNOWN, *, announced: bool = False
    ) -> None:
        """Enter a step that ran [start, end), or at least that long if it is only announced."""
        index = len(self)
        if index and start <= self._starts[-1]:  # rare, because steps arrive in order
            index = bisect_left(self._starts, start)
        if index == len(self) or self._starts[index] != start:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
            self._shares.insert(index, prefill_share)
            if counts != UNKNOWN:
                self._count_from_now(len(self) - 1)
            if self._counted:
                for column, count in zip(self._counts, counts, strict=True):
                    column.insert(index, count)
            if announced:
                self._announced.add(start)
        elif start in self._announced:
            self._shares[index] = prefill_share
            self._set_counts(index, counts)
            self._ends[index] = max(end, self._ends[index]) if announced else end
            if not announced:
                self._announced.discard(start)

    def extend(self, columns: Iterable[bytes]) -> None:
        """Append finished steps in order, all later than the known ones.

        The columns are starts, ends, prefill shares and then `StepCounts`, 8 bytes per entry; a column of `StepCounts`
        may be empty instead of zeros.
        """
        starts, ends, shares, *counts = columns
        if any(counts):
            self._count_from_now(len(self))
        self._starts.frombytes(starts)
        self._ends.frombytes(ends)
        self._shares.frombytes(shares)
        if self._counted:
            for column, more in zip(self._counts, counts, strict=True):
                column.frombytes(more or bytes(len(starts)))

    @property
    def any_counted(self) -> bool:
        """Return whether the work of any step is known."""
        return self._counted

    @property
    def any_announced(self) -> bool:
        """Return whether the end of any step is unknown."""
        return bool(self._announced)

    def running(self) -> RunningStep | None:
        """Return the newest step if it is only announced."""
        if self._starts and self._starts[-1] in self._announced:
            return self._starts[-1], self._shares[-1]
        return None

    def unfinished(self, reach: Callable[[int], int]) -> RanStep | None:
        """Return the newest step as far as it has run, if it is only announced."""
        found = self.running()
        if found is None:
            return None
        return RanStep(found[0], reach(self._ends[-1]), found[1], self._counts_at(-1), running=True)

    def settle(self, reach: Callable[[int], int]) -> None:
        """End every announced step where it was last known to run, as its process can no longer finish it."""
        for start in self._announced:
            index = bisect_left(self._starts, start)
            self._ends[index] = reach(self._ends[index])
            self._set_counts(index, UNKNOWN)
        self._announced.clear()

    def forget_before(self, point: int) -> None:
        """Drop steps that were over by `point`, judged by their end or by the start of the next."""
        gone = 0
        for index, start in enumerate(self._starts):
            over = start not in self._announced and self._ends[index] <= point
            if not over and not (index + 1 < len(self) and self._starts[index + 1] <= point):
                break
            self._announced.discard(start)
            gone = index + 1
        for column in self._columns():
            del column[:gone]

    def forget_from(self, point: int) -> None:
        """Drop steps that started at or after `point`, and cut off one that ran across it."""
        kept = bisect_left(self._starts, point)
        self._announced.difference_update(self._starts[kept:])
        for column in self._columns():
            del column[kept:]
        if kept and self._ends[-1] > point:
            self._ends[-1] = point
            self._set_counts(kept - 1, UNKNOWN)

    def start_of_newest(self, count: int) -> int:
        """Return the start of the oldest among the `count` newest steps, which must exist."""
        return self._starts[-count]

    def begun(self, low: int, high: int) -> int:
        """Return the number of steps that started in [low, high)."""
        return max(bisect_left(self._starts, high) - bisect_left(self._starts, low), 0)

    def ran(self, low: int, high: int, reach: Callable[[int], int]) -> Iterator[RanStep]:
        """Yield steps that ran in [low, high), in order; announced steps end as in `busy`."""
        last = bisect_left(self._starts, high)
        for index in range(max(bisect_right(self._starts, low) - 1, 0), last):
            start, newest = self._starts[index], index + 1 == len(self)
            announced = start in self._announced
            end = reach(self._ends[index]) if announced else self._ends[index]
            end = end if newest else min(end, self._starts[index + 1])
            if end > low:
                yield RanStep(start, end, self._shares[index], self._counts_at(index), running=announced and newest)

    def finished(self, low: int, high: int) -> FinishedSteps:
        """Return the finished steps that ran in [low, high), without cutting them at its ends."""
        first, last = max(bisect_right(self._starts, low) - 1, 0), bisect_left(self._starts, high)
        last = max(first, last)
        starts, ends = np.array(self._starts[first:last], np.int64), np.array(self._ends[first:last], np.int64)
        shares = np.array(self._shares[first:last], np.float64) / FULL_SHARE
        counts = np.zeros((len(self._counts), len(starts)))
        if self._counted:
            counts[:] = [column[first:last] for column in self._counts]
        # A step that encoded images has no tokens, and its work is not in the model's figures.
        has_tokens = counts[[_TOKENS, _DECODES]].any(axis=0)
        usable = (ends > starts) & has_tokens
        if self._announced:
            usable &= ~np.isin(starts, list(self._announced))
        return FinishedSteps(starts[usable], ends[usable], shares[usable], counts[:, usable])

    def busy(self, low: int, high: int, reach: Callable[[int], int]) -> "BusyTime | FewBusyTime":
        """Return the running time inside [low, high). An announced step is extended by at most `reach` beyond its last
        known end.
        """
        first = max(bisect_right(self._starts, low) - 1, 0)
        last = bisect_left(self._starts, high)
        if last - first <= FEW_STEPS:
            return self._few_busy(first, last, low, high, reach)
        starts = np.array(self._starts[first:last], dtype=np.int64)
        ends = np.array(self._ends[first:last], dtype=np.int64)
        provisional = False
        for start in self._announced:
            index = bisect_left(self._starts, start)
            if first <= index < last:
                ends[index - first] = reach(self._ends[index])
                provisional = provisional or bool(ends[index - first] > low)
        # A device runs one step at a time, so if reports overlap, a step ends when the next one starts.
        ends[:-1] = np.minimum(ends[:-1], starts[1:])
        before = np.maximum(low - starts, 0) % _TURN_NS
        starts = np.clip(starts, low, high)
        ends = np.clip(ends, starts, high)
        return BusyTime(starts, ends, np.array(self._shares[first:last], dtype=np.int64), before, provisional)

    def _counts_at(self, index: int) -> StepCounts:
        return StepCounts._make(column[index] for column in self._counts) if self._counted else UNKNOWN

    def _count_from_now(self, steps: int) -> None:
        """Store the work of steps from now on, after `steps` steps of unknown work."""
        if not self._counted:
            self._counted = True
            for column in self._counts:
                column.frombytes(bytes(column.itemsize * steps))

    def _set_counts(self, index: int, counts: StepCounts) -> None:
        if counts != UNKNOWN:
            self._count_from_now(len(self))
        if not self._counted:
            return
        for column, count in zip(self._counts, counts, strict=True):
            column[index] = count

    def _columns(self) -> "tuple[array[int], ...]":
        return (self._starts, self._ends, self._shares, *self._counts)

    def _few_busy(self, first: int, last: int, low: int, high: int, reach: Callable[[int], int]) -> "FewBusyTime":
        # Comparisons instead of min and max, because this runs 20,000 times a second for 1,000 workers.
        steps, provisional, starts = [], False, self._starts
        for index in range(first, last):
            start, end = starts[index], self._ends[index]
            if start in self._announced:
                end = reach(end)
                provisional = provisional or end > low
            if index + 1 < last and end > starts[index + 1]:
                end = starts[index + 1]
            before = 0
            if start < low:
                before, start = low - start, low
            if end > high:  # noqa: PLR1730
                end = high
            if start < end:
                steps.append((start, end, self._shares[index], before))
        return FewBusyTime(steps, provisional)


class FewBusyTime:
    """A variant of `BusyTime` for few steps, equal to the nanosecond."""

    def __init__(self, steps: list[tuple[int, int, int, int]], provisional: bool) -> None:
        """Create the times from tuples (start, end, prefill share, ns that the step had run at start), disjoint and in
        order.
        """
        self.provisional = provisional
        self._steps = steps

    def between(self, spans: list[tuple[int, int]]) -> tuple[int, int]:
        """Return (total, prefill) nanoseconds of steps inside the disjoint `spans`."""
        total = prefill = 0
        for low, high in spans:
            for start, end, share, before in self._steps:
                after = low - start if low > start else 0
                until = (end if end < high else high) - start
                if until <= after:
                    continue
                total += until - after
                if share:
                    # Rounded relative to the step's start at both ends, so that its parts add up to the whole.
                    prefill += ((before + until) * share >> SHARE_BITS) - ((before + after) * share >> SHARE_BITS)
        return total, prefill


class BusyTime:
    """Running time as a monotonic function of time, so that parts of a window add up exactly."""

    def __init__(
        self,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        shares: NDArray[np.int64],
        before: NDArray[np.int64],
        provisional: bool,
    ) -> None:
        """Create the times from disjoint steps in order; `before` is the time that each had run at its start, modulo
        `_TURN_NS`.
        """
        self.provisional = provisional
        """True if an unfinished step is among them."""
        self._starts = starts
        self._ends = ends
        self._shares = shares
        self._before = before
        self._before_prefill = before * shares >> SHARE_BITS
        lengths = ends - starts
        self._steps_before = np.concatenate(([0], np.cumsum(lengths)))
        prefill = ((before + lengths) * shares >> SHARE_BITS) - self._before_prefill
        self._prefill_before = np.concatenate(([0], np.cumsum(prefill)))

    def between(self, spans: list[tuple[int, int]]) -> tuple[int, int]:
        """Return (total, prefill) nanoseconds of steps inside the disjoint `spans`."""
        if not spans or not len(self._starts):
            return 0, 0
        edges = np.array(spans, dtype=np.int64)  # [spans, 2]
        # The last step that starts at or before each edge; -1 before the first step.
        index = np.searchsorted(self._starts, edges, side="right") - 1
        held = np.maximum(index, 0)
        elapsed = np.where(index >= 0, np.minimum(edges, self._ends[held]) - self._starts[held], 0)
        steps = self._steps_before[held] + elapsed
        part = ((self._before[held] + elapsed) * self._shares[held] >> SHARE_BITS) - self._before_prefill[held]
        prefill = self._prefill_before[held] + np.where(index >= 0, part, 0)
        return int((steps[:, 1] - steps[:, 0]).sum()), int((prefill[:, 1] - prefill[:, 0]).sum())


def effort_within(compute: Compute, steps: FinishedSteps, low_ns: int, high_ns: int) -> Effort:
    """Return the work done in [low, high); a step's effort is spread evenly over its time."""
    inside = np.clip(np.minimum(steps.ends_ns, high_ns) - np.maximum(steps.starts_ns, low_ns), 0, None)
    parts = inside / (steps.ends_ns - steps.starts_ns)
    tokens, prompts, context, _, _, reported_squared = steps.counts
    alike = np.maximum(tokens * (2 * context - tokens) / np.maximum(prompts, 1), 0)  # as in `StepWork.squared`
    squared = np.where(reported_squared > 0, reported_squared, alike) * (tokens > 0)
    # The cost of a step is linear in these sums, so steps are added up before the computation.
    sums = [*map(float, steps.counts[:-1] @ parts), float(squared @ parts)]
    work = StepWork(*sums)  # type: ignore[arg-type] # parts of steps are no whole numbers
    prefill_steps = float(steps.prefill_shares @ parts)
    return effort_of(compute, work, prefill_steps=prefill_steps, decode_steps=float(parts.sum()) - prefill_steps)


@dataclass(frozen=True, slots=True)
class StepShare:
    """A step with its part of a window's covered time in ns. The parts of all steps add up to the window's times."""

    step: RanStep
    prefill_ns: int
    decode_ns: int


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Covered time and its phases in ns; `idle_ns` is the time that no step and no KV wait claims."""

    covered_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    kv_wait_ns: int = 0
    provisional: bool = False
    """True if part of the time is a step that still runs."""

    @property
    def idle_ns(self) -> int:
        return self.covered_ns - self.prefill_ns - self.decode_ns - self.kv_wait_ns

    def times(self, gpus: int) -> "PhaseTime":
        """Return the same time in GPU-nanoseconds for a worker with `gpus` GPUs."""
        return PhaseTime(
            self.covered_ns * gpus,
            self.prefill_ns * gpus,
            self.decode_ns * gpus,
            self.kv_wait_ns * gpus,
            self.provisional,
        )

    def __add__(self, other: "PhaseTime") -> "PhaseTime":
        return PhaseTime(
            self.covered_ns + other.covered_ns,
            self.prefill_ns + other.prefill_ns,
            self.decode_ns + other.decode_ns,
            self.kv_wait_ns + other.kv_wait_ns,
            self.provisional or other.provisional,
        )
