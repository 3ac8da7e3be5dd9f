"""A worker's wall time cut into prefill, decode, KV wait and idle, in integer nanoseconds that add up exactly."""

from array import array
from collections.abc import Iterator, Sequence
from copy import deepcopy
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_name
from libs.contracts.step_row import ENTRY_BYTES, StepRow, sent_columns, step_rows
from libs.perfmodel.utilisation import Effort
from libs.telemetry.columns import (
    ENCODED_IMAGES,
    END,
    INT64_END,
    LONGEST_NS,
    NO_END,
    START,
    UNREPORTED,
    Followed,
    PrefillShares,
    well_formed,
)
from libs.telemetry.intervals import Intervals, PhaseParts, RoleLog, total_ns
from libs.telemetry.steps import (
    COUNTS,
    BusyTime,
    FewBusyTime,
    FinishedSteps,
    PhaseTime,
    RanStep,
    RunningStep,
    StepCounts,
    StepLog,
    StepShare,
    effort_within,
)
from libs.telemetry.workers import Shape, WorkerFacts, facts_of, what_stays

HISTORY_NS: Final = 660 * 1_000_000_000
TRIM_NS: Final = 30 * 1_000_000_000
"""The size of the pieces in which history is dropped, which keeps dropping cheap."""
MAX_STEPS: Final = 65_536
"""The bound on steps kept of one worker. A worker with more steps in `HISTORY_NS` keeps a shorter history."""
UNCOUNTED_PART: Final = 4
"""The divisor of that bound for a worker whose steps all have unknown work."""
MAX_INTERVALS: Final = 16_384
"""The maximum number of covers, KV waits and runs of batch numbers, each at 16 bytes an entry."""
MAX_NEW: Final = 16
"""The maximum number of batches not yet merged into the history, nearly two seconds of a worker's."""
# attrgetter reads protobuf fields in C, several times faster than one by one.
_HEAD: Final = attrgetter(
    "incarnation", "sequence", "covered_from_unix_ns", "covered_to_unix_ns", "last", "steps", "description",
    "sched_delay_ns",
)  # fmt: skip
_MORE: Final = attrgetter("kv_waits", "starved", "kv_transfers", "gpu_readings")
"""The optional lists of a batch beside its steps."""


PlainBatch = tuple[int, int, Sequence[bytes], bytes, Sequence[tuple[int, int]]]
"""The cover [low, high) of a batch, its columns as sent, packed prefill shares and KV waits. It is a bare tuple, since
millions are made.
"""


def _joined(columns: Sequence[Sequence[bytes]], shares: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the columns of several batches for `StepLog.extend`; columns that all batches omit are empty."""
    whole = sum(map(len, shares))
    for index in (START, END):
        yield b"".join([each[index] for each in columns])
    yield b"".join(shares)
    for index in range(COUNTS.start, COUNTS.stop):
        column = b"".join([each[index] for each in columns])
        if len(column) != whole and column:
            column = b"".join([each[index] or bytes(len(each[START])) for each in columns])
        yield column


class BatchOutcome(StrEnum):
    COUNTED = "counted"
    DUPLICATE = "duplicate"
    VOID = "void"
    """The batch is from an incarnation that a newer one has replaced."""
    MALFORMED = "malformed"


class Timeline:
    """The history of one worker from its batches, which may arrive in any order and repeatedly."""

    def __init__(self, prefill_shares: PrefillShares, turn: int = 0) -> None:
        """Create an empty timeline; workers with different `turn` do their costly bookkeeping at different times."""
        self._prefill_shares = prefill_shares
        self._until_turn = MAX_NEW - turn % MAX_NEW
        """Batches until the next merge into the history. Merges caused by readers do not reset it; otherwise all
        workers would merge at once from then on.
        """
        self._covers = Intervals()
        self._kv_waits = Intervals()
        self._phase_parts = PhaseParts()
        self._steps = StepLog()
        self._shape = Shape()
        self._seen = Intervals()
        """Received batch numbers of this incarnation, without the newest run of them."""
        self._run = 0
        """The start of the newest run: all numbers from here to `_next` have arrived."""
        self._seen_from = 0
        """The number below which batches count as duplicates."""
        self._first = 0
        """The first number received; those below it do not count as lost."""
        self._next = 0
        """One past the highest batch number received so far."""
        self._reported_to_ns = 0
        """The end of the latest cover that was merged into the history."""
        self._kept_from_ns = 0
        self._roles = RoleLog()
        self.known_to_ns = 0
        """The time beyond which no report reaches, except for a step that still runs; it never goes back."""
        self.changed_from_ns = 0
        """The earliest time that the last batch changed."""
        self._new: list[PlainBatch] = []
        """Entered batches that are not merged into the history yet. Touching all parts of the history costs more than
        adding one batch to them.
        """
        self.max_steps = MAX_STEPS
        """The bound on steps, which the fleet lowers as the number of workers grows."""
        self.last_step_end_ns = 0
        """The latest end of a finished step; the start of the incarnation before there is one."""
        # The batch that describes the worker's present state. Only this class sets it; a property would cost readers of
        # all workers more than what they read.
        self.newest: StepBatch | None = None
        self._stays: tuple[object, ...] = ()
        """The worker's description as of the newest batch, in the fields of `what_stays`."""
        self.revision = 0
        """The number of changes of the description, the incarnation included."""
        self._goes_on = False
        """True if the state of the worker allows `follow` to accept its next batch."""
        self._facts: WorkerFacts | None = None
        """Facts of the newest batch; None until extracted."""
        self._worker_id = ""
        self._node = ""
        self._description = 0
        """The number of the description in the newest batch; 0 if the worker does not number them."""
        self._incarnation = 0
        self._left = False
        self.lost_batches = 0
        """Batch numbers that were skipped and have not arrived since."""

    def add(self, batch: StepBatch) -> BatchOutcome:
        """Enter a batch in any order; a batch that was entered before is never counted twice."""
        if (steps := self._read(batch)) is None:
            return BatchOutcome.MALFORMED
        refused = self._refusal(batch)
        if refused is not None:
            return refused
        if self.newest is None or batch.incarnation > self._incarnation:
            self._start_anew(batch)
        self._note_sequence(batch)
        self._enter_all(batch, steps)
        return BatchOutcome.COUNTED

    def follow(self, batch: StepBatch, arrived_ns: int) -> Followed | None:
        """Accept a batch that continues the last one and return its parts; otherwise change nothing and return None.

        The caller must enter an accepted batch before it reads from this timeline or sorts another batch in. Batches
        that overlap earlier ones, change the worker's description or end with a running step do not continue the last
        one. Raise ValueError if columns of steps differ in length.
        """
        incarnation, number, low_ns, high_ns, last, steps, description, waited_ns = _HEAD(batch)
        if not (
            self._goes_on
            and not last
            and incarnation == self._incarnation
            and self._next <= number < INT64_END
            and self.known_to_ns <= low_ns <= high_ns <= low_ns + LONGEST_NS
            and high_ns < INT64_END
            and ((description and description == self._description) or what_stays(batch) == self._stays)
        ):
            return None
        columns = sent_columns(steps)
        ends = columns[END]
        if ends[-ENTRY_BYTES:] == NO_END or (columns[START] and not ends):
            return None
        if number == self._next:  # the usual case
            self._next += 1
            self.newest, self._facts = batch, None
        else:
            self._note_sequence(batch)
        self.known_to_ns, self.changed_from_ns = high_ns, low_ns
        has = batch.HasField
        if not waited_ns and not has("sched_delay_ns"):
            waited_ns = UNREPORTED
        # Nearly all workers report their waits for a CPU, so those alone make no batch fuller.
        fuller = any(_MORE(batch)) or has("dummy_steps") or has("estimate")
        if fuller or columns[ENCODED_IMAGES]:
            self._phase_parts.take(batch)
        return batch, self._worker_id, low_ns, high_ns, columns, arrived_ns, self._node, fuller, waited_ns

    def enter(self, batch: PlainBatch, last_end_ns: int) -> None:
        """Enter a plain batch that `follow` accepted, whose last step ended at `last_end_ns`; 0 without steps."""
        self._new.append(batch)
        self.last_step_end_ns = max(self.last_step_end_ns, last_end_ns)
        self._until_turn -= 1
        if not self._until_turn:
            self._until_turn = MAX_NEW
            self._take_in()

    def sort_in(self, batch: StepBatch) -> bool:
        """Enter a batch that `follow` accepted and that is not plain; return False if it is malformed."""
        if (steps := self._read(batch)) is None:
            return False
        self._enter_all(batch, steps)
        return True

    @property
    def says(self) -> tuple[object, ...]:
        """The worker's description without the facts that change from batch to batch."""
        return (*self._stays, self._left)

    @property
    def incarnation(self) -> int:
        """The incarnation of the newest batch; 0 before the first one."""
        return self._incarnation

    @property
    def facts(self) -> WorkerFacts | None:
        """The worker's description by its newest batch; None before the first one."""
        if self._facts is None and self.newest is not None:
            self._facts = facts_of(self.newest, self._shape.compute)
        return self._facts

    @property
    def efforts_from_ns(self) -> int:
        """The time from which `effort` covers finished steps.

        It starts with the worker's report of its model's shape, as far as history is kept.
        """
        self._take_in()
        return max(self._kept_from_ns, self._shape.from_ns)

    @property
    def reported_from_ns(self) -> int:
        """The earliest moment that is covered; 0 before the first batch."""
        self._take_in()
        return self._covers.start

    @property
    def running_step(self) -> RunningStep | None:
        """The step that currently runs, as far as is known; None if there is none."""
        # Batches that wait for the history have no announced step, and `follow` accepts none after an announced one.
        return None if self._new else self._steps.running()

    def unfinished(self) -> RanStep | None:
        """Return the currently running step with its work, as far as it has run; None if there is none."""
        self._take_in()
        return self._steps.unfinished(self._covers.reach)

    def go_on(
        self, batch: StepBatch, *, last_step_end_ns: int, lost_batches: int, running_step: RunningStep | None
    ) -> None:
        """Take over an incarnation from the process that read it before; its first batch here is `batch`.

        That process holds the facts that the worker reported only once, long before `batch`.
        """
        self._take_in()
        self.last_step_end_ns = max([last_step_end_ns, *array("Q", batch.steps.end_unix_ns)])
        self.lost_batches += lost_batches
        if running_step is not None and running_step[0] < batch.covered_from_unix_ns:
            start_ns, prefill_share = running_step
            self._steps.add(start_ns, batch.covered_from_unix_ns, prefill_share, announced=True)
            self._judge()

    def phases(self, low_ns: int, high_ns: int) -> PhaseTime:
        """Return the phases of the covered part of [low, high); the span is at most ten minutes long."""
        self._take_in()
        covers = self._covers.within(low_ns, high_ns)
        busy = self._steps.busy(low_ns, high_ns, self._covers.reach)
        steps_ns, prefill_ns = busy.between(covers)
        waited_ns = self._waited_ns(covers, busy)
        return PhaseTime(total_ns(covers), prefill_ns, steps_ns - prefill_ns, waited_ns, busy.provisional)

    def _waited_ns(self, spans: list[tuple[int, int]], busy: BusyTime | FewBusyTime) -> int:
        waits = self._kv_waits.within_each(spans)
        return total_ns(waits) - busy.between(waits)[0] if waits else 0

    def starved_ns(self, low_ns: int, high_ns: int) -> int:
        """Return the idle ns in [low, high) in which all awaited KV was still being computed elsewhere."""
        self._take_in()
        return total_ns(self._phase_parts.starved.within_each(self._covers.within(low_ns, high_ns)))

    def dummy_ns(self, low_ns: int, high_ns: int) -> int:
        """Return the idle ns in [low, high) in which dummy steps ran, without the time that a step or a KV wait
        claims.
        """
        self._take_in()
        dummies = self._phase_parts.dummies.within_each(self._covers.within(low_ns, high_ns))
        if not dummies:  # the usual case
            return 0
        busy = self._steps.busy(low_ns, high_ns, self._covers.reach)
        return total_ns(dummies) - busy.between(dummies)[0] - self._waited_ns(dummies, busy)

    def encode_ns(self, low_ns: int, high_ns: int) -> int:
        """Return the prefill ns in [low, high) of finished steps that encoded images."""
        self._take_in()
        encodes = self._phase_parts.encodes.within_each(self._covers.within(low_ns, high_ns))
        if not encodes:  # the usual case
            return 0
        return self._steps.busy(low_ns, high_ns, self._covers.reach).between(encodes)[1]

    def steps(self, low_ns: int, high_ns: int) -> Iterator[StepShare]:
        """Yield the steps behind `phases`, in order."""
        self._take_in()
        for step in self._steps.ran(low_ns, high_ns, self._covers.reach):
            start_ns, end_ns = max(step.start_ns, low_ns), min(step.end_ns, high_ns)
            busy = FewBusyTime([(start_ns, end_ns, step.prefill_share, start_ns - step.start_ns)], step.running)
            spent_ns, prefill_ns = busy.between(self._covers.within(start_ns, end_ns))
            yield StepShare(step, prefill_ns, spent_ns - prefill_ns)

    def begun(self, low_ns: int, high_ns: int) -> int:
        """Return the number of steps that started in [low, high)."""
        self._take_in()
        return self._steps.begun(low_ns, high_ns)

    def kv_waits(self, low_ns: int, high_ns: int) -> list[tuple[int, int]]:
        """Return reported KV waits in [low, high), in order; time that overlaps a step counts for the step."""
        self._take_in()
        return self._kv_waits.within(low_ns, high_ns)

    def finished(self, low_ns: int, high_ns: int) -> FinishedSteps:
        """Return the steps that ran in [low, high) and have ended."""
        self._take_in()
        return self._steps.finished(low_ns, high_ns)

    def effort(self, low_ns: int, high_ns: int) -> Effort:
        """Return the work that finished steps computed and moved in [low, high), as far as the worker reports it."""
        self._take_in()
        compute, low_ns = self._shape.compute, max(low_ns, self._shape.from_ns)
        if compute is None or low_ns >= high_ns:
            return Effort()
        return effort_within(compute, self._steps.finished(low_ns, high_ns), low_ns, high_ns)

    def role_at(self, at_ns: int) -> str:
        """Return the worker's role at a moment, as far as is known; empty when none is."""
        self._take_in()
        return self._roles.at(at_ns)

    def _read(self, batch: StepBatch) -> list[tuple[StepRow, int]] | None:
        """Return a batch's steps with their prefill shares; None for a malformed batch."""
        try:
            steps = list(zip(step_rows(batch.steps), self._prefill_shares(batch), strict=True))
        except ValueError:
            return None
        return steps if well_formed(batch, steps) else None

    def _refusal(self, batch: StepBatch) -> BatchOutcome | None:
        if self.newest is None or batch.incarnation > self._incarnation:
            return None
        if batch.incarnation < self._incarnation:
            return BatchOutcome.VOID
        number = batch.sequence
        known = self._run <= number < self._next or number in self._seen or number < self._seen_from
        return BatchOutcome.DUPLICATE if known else None

    def _start_anew(self, batch: StepBatch) -> None:
        """Begin a new incarnation: the old one's steps end where last seen, and its claims on later time are void."""
        self._take_in()
        self._steps.settle(self._covers.reach)
        for kept in (self._covers, self._kv_waits, self._phase_parts, self._steps):
            kept.forget_from(batch.covered_from_unix_ns)
        self._roles.forget_from(batch.covered_from_unix_ns)
        self._seen, self._seen_from = Intervals(), 0
        self._first = self._run = self._next = batch.sequence
        self._worker_id = batch.worker_id
        self.last_step_end_ns = batch.covered_from_unix_ns

    def _take_newest(self, batch: StepBatch) -> None:
        self._shape.take(batch)
        self._description = batch.description
        stays = what_stays(batch)
        if stays != self._stays:
            self.revision += 1
            self._node = batch.node
            self._stays = deepcopy(stays)  # copied, as a submessage keeps its whole batch in memory
        self.newest, self._facts = batch, None

    def _note_sequence(self, batch: StepBatch) -> None:
        number = batch.sequence
        if number >= self._next:
            self._take_newest(batch)
            self.revision += (batch.incarnation, batch.last) != (self._incarnation, self._left)
            self._incarnation, self._left = batch.incarnation, batch.last
            if number == self._next:  # the usual case
                self._next += 1
                return
            self.lost_batches += number - self._next
            self._seen.add(self._run, self._next)
            self._run, self._next = number, number + 1
        else:
            self.lost_batches -= number > self._first
            self._seen.add(number, number + 1)
        if len(self._seen) > MAX_INTERVALS:
            self._seen_from = self._seen.start_of_newest(MAX_INTERVALS)
            self._seen.forget_before(self._seen_from)

    def _take_in(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        role = self._roles.newest
        lows_ns, highs_ns, columns, shares, waits_ns = zip(*new, strict=True)
        gapless = lows_ns[1:] == highs_ns[:-1]  # the usual case
        for low_ns, high_ns in [(lows_ns[0], highs_ns[-1])] if gapless else zip(lows_ns, highs_ns, strict=True):
            self._covers.add(low_ns, high_ns)
            self._roles.add(low_ns, high_ns, role)
        for wait in chain.from_iterable(waits_ns):
            self._kv_waits.add(*wait)
        self._steps.extend(_joined(columns, shares))
        self._reported_to_ns = highs_ns[-1]
        self._forget_old()

    def _enter_all(self, batch: StepBatch, steps: Sequence[tuple[StepRow, int]]) -> None:
        self._take_in()
        self._enter_times(batch, [step for step, _ in steps])
        for step, share in steps:
            self._enter_step(step, share, batch.covered_to_unix_ns)
        self._forget_old()
        self._judge()

    def _judge(self) -> None:
        # The result stays valid across batches that `follow` accepts.
        steady = self.newest is not None and role_name(self.newest.assignment) == self._roles.newest
        self._goes_on = steady and not self._left and not self._steps.any_announced

    def _enter_times(self, batch: StepBatch, steps: Sequence[StepRow]) -> None:
        ends = [step.end_unix_ns for step in steps] + [wait.end_unix_ns for wait in batch.kv_waits]
        self.known_to_ns = max([self.known_to_ns, batch.covered_to_unix_ns, *ends])
        self.changed_from_ns = min([batch.covered_from_unix_ns, *(step.start_unix_ns for step in steps)])
        self._reported_to_ns = max(self._reported_to_ns, batch.covered_to_unix_ns)
        self._covers.add(max(batch.covered_from_unix_ns, self._kept_from_ns), batch.covered_to_unix_ns)
        for wait in batch.kv_waits:
            self._kv_waits.add(wait.start_unix_ns, wait.end_unix_ns)
        self._phase_parts.take(batch)
        self._roles.add(batch.covered_from_unix_ns, batch.covered_to_unix_ns, role_name(batch.assignment))

    def _enter_step(self, step: StepRow, share: int, covered_to_ns: int) -> None:
        row: tuple[int, ...] = step
        start_ns, end_ns, counts = step.start_unix_ns, step.end_unix_ns, StepCounts._make(row[COUNTS])
        if end_ns:
            self._steps.add(start_ns, end_ns, share, counts)
            self.last_step_end_ns = max(self.last_step_end_ns, end_ns)
        else:
            self._steps.add(start_ns, max(start_ns, covered_to_ns), share, counts, announced=True)

    def _forget_old(self) -> None:
        """Drop old history beyond its bounds. Dropped time is no longer covered, so it never counts as idle."""
        oldest_ns = self._reported_to_ns - HISTORY_NS
        keep_from_ns = oldest_ns if oldest_ns > self._kept_from_ns + TRIM_NS else self._kept_from_ns
        # For steps without known work, such as those of observed servers, windows hold the same information.
        most_steps = self.max_steps if self._steps.any_counted else self.max_steps // UNCOUNTED_PART
        if len(self._steps) > most_steps:
            keep_from_ns = max(keep_from_ns, self._steps.start_of_newest(most_steps * 15 // 16))
        for intervals in (self._covers, self._kv_waits, *self._phase_parts):
            of_steps = intervals is self._phase_parts.dummies or intervals is self._phase_parts.encodes
            bound = self.max_steps if of_steps else MAX_INTERVALS
            if len(intervals) > bound:
                keep_from_ns = max(keep_from_ns, intervals.start_of_newest(bound * 15 // 16))
        if keep_from_ns > self._kept_from_ns:
            self._kept_from_ns = keep_from_ns
            for kept in (self._covers, self._kv_waits, self._phase_parts, self._steps):
                kept.forget_before(keep_from_ns)
