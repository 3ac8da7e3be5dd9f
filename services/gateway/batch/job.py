"""A batch job: its errors, the progress of its shares, its state, and the prediction of its end. Pure.

The note committed with a share's offset contains the answered lines and those answered with an error. The end is
predicted from the recent rate of answers.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from libs.contracts.errors import BrokerUnavailable, FulcrumError, InvalidRequest, NoWorkers, TopicRefused
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Foretold, Progress
from libs.policy.batch import OpenJob, queues_of


class LineRefused(InvalidRequest):
    code = "invalid_line"


class MalformedLine(LineRefused):
    code = "invalid_json_line"


class RepeatedId(LineRefused):
    """An error for a line whose custom_id is that of an earlier line."""

    code = "duplicate_custom_id"


class WrongUrl(LineRefused):
    """An error for a line whose URL differs from the job's endpoint."""

    code = "mismatched_url"


class NotRun(FulcrumError):
    """An error for a line that never ran. The subclass's `code` is the reason."""

    code = "not_run"
    error_type = "invalid_request_error"
    http_status = 409


class Cancelled(NotRun):
    """An error for a line that did not run before its job was cancelled."""

    code = "batch_cancelled"


class Expired(NotRun):
    """An error for a line that did not run before the window of its job ended."""

    code = "batch_expired"


def stopped(expires_unix_ns: int, now_ns: int, *, cancelled: bool) -> NotRun | None:
    """Return the reason for which no more lines of a job run, or None while they do."""
    if cancelled:
        return Cancelled("the batch was cancelled first")
    return Expired("the batch's window ended first") if now_ns >= expires_unix_ns else None


class OutputRefused(NotRun):
    """An error for lines of a job whose output topic refuses its answers."""

    code = TopicRefused.code


class InputGone(NotRun):
    """An error for lines whose input file was deleted."""

    code = "input_file_gone"


class NoWorkersForLong(NoWorkers):
    """An error for a line whose model had no workers for longer than other lines can wait."""


class AnswerTooLarge(FulcrumError):
    """An error for a line whose answer is too large for a record."""

    code = "answer_too_large"


class PerhapsCreated(BrokerUnavailable):
    """An error after which the broker may have accepted the job.

    Without an idempotency key, a retry could create a second job.
    """

    repeatable = False


_NOTE: Final = re.compile(r"([0-9a-f]{1,2048})/([0-9a-f]{1,2047})")


@dataclass(slots=True)
class ShareNote:
    """The progress of a share: two bits per line. Its text is short enough for a broker to store with an offset."""

    lines: int
    answered: int = 0
    """A bit set of the answered lines, by index in the share."""
    failed: int = 0
    """A bit set of the lines answered with an error, by index in the share."""

    @classmethod
    def read(cls, text: str, lines: int) -> "ShareNote":
        """Parse a committed note. An empty or invalid one means that no line has been answered."""
        found = _NOTE.fullmatch(text)
        if not found:
            return cls(lines)
        answered = int(found[1], 16) & (1 << lines) - 1
        return cls(lines, answered, int(found[2], 16) & answered)

    def text(self) -> str:
        """Return the committed form of the note: both bit sets in hexadecimal."""
        return f"{self.answered:x}/{self.failed:x}"

    def add(self, index: int, *, ok: bool) -> None:
        """Mark the line at `index` in the share as answered."""
        self.answered |= 1 << index
        if not ok:
            self.failed |= 1 << index

    def has(self, index: int) -> bool:
        return bool(self.answered >> index & 1)

    @property
    def whole(self) -> bool:
        return self.answered == (1 << self.lines) - 1

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of lines answered without an error, and of those answered with one."""
        failed = self.failed.bit_count()
        return self.answered.bit_count() - failed, failed


@dataclass(slots=True)
class ShareCounts:
    """The progress of a job's shares.

    Counts only increase, so reports that arrive late or twice have no effect.
    """

    completed: int = 0
    failed: int = 0
    open: dict[int, Progress] = field(default_factory=dict)
    """The latest progress of shares that have unanswered lines."""
    whole_below: int = 0
    """The number below which all shares are completely answered."""
    whole_above: dict[int, Progress] = field(default_factory=dict)
    """The progress of completely answered shares from `whole_below` on."""

    def whole(self, share: int) -> bool:
        return share < self.whole_below or share in self.whole_above

    def add(self, progress: Progress) -> bool:
        """Apply a progress report. Return False if it adds nothing to the known progress."""
        share = progress.share
        if self.whole(share):
            return False
        known = self.open.get(share, Progress())
        if progress.completed + progress.failed <= known.completed + known.failed:
            return False
        self.completed += progress.completed - known.completed
        self.failed += progress.failed - known.failed
        if not progress.whole:
            self.open[share] = progress
            return True
        self.open.pop(share, None)
        self.whole_above[share] = progress
        while self.whole_below in self.whole_above:
            del self.whole_above[self.whole_below]
            self.whole_below += 1
        return True

    def merged(self, other: "ShareCounts") -> "ShareCounts":
        """Return the union of both counts. Both objects may be modified."""
        most, least = (other, self) if other.whole_below > self.whole_below else (self, other)
        for progress in (*least.whole_above.values(), *least.open.values()):
            most.add(progress)
        return most


Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_OUTCOMES: dict[int, Status] = {
    pb.OUTCOME_COMPLETED: "completed",
    pb.OUTCOME_CANCELLED: "cancelled",
    pb.OUTCOME_EXPIRED: "expired",
    pb.OUTCOME_FAILED: "failed",
}


@dataclass(slots=True)
class Job:
    id: str
    created: pb.Created
    created_unix_ns: int
    started: pb.Started | None = None
    started_unix_ns: int = 0
    cancel_unix_ns: int = 0
    finished: pb.Finished | None = None
    finished_unix_ns: int = 0
    answered_unix_ns: int = 0
    dealt: pb.Dealt = field(default_factory=pb.Dealt)
    expected_end: pb.Foretold | None = None
    waits: pb.Waits | None = None
    assembled: pb.Assembled | None = None
    counts: ShareCounts = field(default_factory=ShareCounts)

    @property
    def input_file_id(self) -> str:
        """The file that contains the job's lines; empty while they are only in a topic."""
        return (self.started.input_file_id if self.started else "") or self.created.input_file_id

    @property
    def lines(self) -> int:
        """The number of lines in the job's file; 0 until they are counted."""
        return self.started.lines if self.started else 0

    @property
    def completed(self) -> int:
        return self.finished.completed if self.finished else self.counts.completed

    @property
    def failed(self) -> int:
        return self.finished.failed if self.finished else self.counts.failed

    @property
    def waits_for(self) -> str:
        """The reason for which the job waits; empty while it runs and after its end."""
        return self.waits.reason if self.waits and self.finished is None else ""

    @property
    def answered(self) -> bool:
        return self.started is not None and self.completed + self.failed >= self.started.lines

    def stopped(self, now_ns: int) -> NotRun | None:
        """Return the reason for which no more of the job's lines run, or None while they do."""
        return stopped(self.created.expires_unix_ns, now_ns, cancelled=bool(self.cancel_unix_ns))

    def standing(self, now_ns: int) -> OpenJob | None:
        """Return the inputs to the dealing of the job's shares.

        Return None before the job's lines are counted and after all have been answered.
        """
        left = self.lines - self.completed - self.failed
        if self.finished is not None or not left:
            return None
        is_stopped = self.stopped(now_ns) is not None
        return OpenJob(
            job_id=self.id,
            tenant=self.created.tenant,
            priority=self.created.priority,
            created_unix_ns=self.created_unix_ns,
            expires_unix_ns=self.created.expires_unix_ns,
            open_lines=max(self.dealt.lines - self.completed - self.failed, 0),
            undealt_lines=0 if is_stopped else self.lines - self.dealt.lines,
            stopped=is_stopped,
        )

    @property
    def status(self) -> Status:
        if self.finished is not None:
            return _OUTCOMES.get(self.finished.outcome, "failed")
        if self.cancel_unix_ns:
            return "cancelling"
        if self.started is None:
            return "validating"
        return "finalizing" if self.answered else "in_progress"


WINDOW_S = 60.0
MIN_S = 2.0
"""The minimum time with work after which a rate is reported."""
MARGIN = 0.05
"""The tolerance of lateness, as a share of the remaining time.

A job becomes late when its end is this far beyond its window, and stops being late when it is this far within it.
"""
MOVED = 0.2
"""The change of a predicted end, as a share of the remaining time, above which it is published again."""


class LineRate:
    """The number of lines answered per second over the last minute. Time without work is excluded."""

    def __init__(self) -> None:
        self._answered: deque[tuple[int, int]] = deque()
        self._lines = 0
        self._since_ns = 0

    def work_begins(self, at_ns: int) -> None:
        """Restart the measurement after a time without work."""
        self._answered.clear()
        self._lines, self._since_ns = 0, at_ns

    def add(self, at_ns: int, lines: int) -> None:
        self._answered.append((at_ns, lines))
        self._lines += lines
        self._drop(at_ns)

    def per_s(self, now_ns: int) -> float | None:
        """Return the lines per second, or None in the first `MIN_S` seconds of work."""
        self._drop(now_ns)
        since_ns = max(self._since_ns, now_ns - int(WINDOW_S * 1e9))
        seconds = (now_ns - since_ns) / 1e9
        return self._lines / seconds if self._since_ns and seconds >= MIN_S else None

    def _drop(self, now_ns: int) -> None:
        oldest_ns = now_ns - int(WINDOW_S * 1e9)
        while self._answered and self._answered[0][0] < oldest_ns:
            self._lines -= self._answered.popleft()[1]


def ends_s(jobs: Iterable[OpenJob], now_ns: int, per_s: float) -> dict[str, float]:
    """Return the seconds until each job ends. Jobs that never end at this rate are left out.

    Tenants are assumed to get equal shares and to run their jobs one after another.
    """
    found: dict[str, float] = {}
    if per_s <= 0:
        return found
    queues = [deque((job.job_id, float(job.left_lines)) for job in q) for q in queues_of(jobs, now_ns, per_s).values()]
    passed_s = 0.0
    while queues := [queue for queue in queues if queue]:
        each_per_s = per_s / len(queues)
        lines = min(queue[0][1] for queue in queues)
        passed_s += lines / each_per_s
        for queue in queues:
            job_id, left = queue.popleft()
            if left > lines:
                queue.appendleft((job_id, left - lines))
            else:
                found[job_id] = passed_s
    return found


def news(job: OpenJob, known: Foretold | None, end_s: float | None, now_ns: int) -> Foretold | None:
    """Return the prediction to publish for a job, or None if it hardly differs from the last one, `known`."""
    left_s = max((job.expires_unix_ns - now_ns) / 1e9, 0.0)
    was_late = known is not None and known.late
    late = end_s is None or end_s > left_s * (1 - MARGIN if was_late else 1 + MARGIN)
    end_unix_ns = 0 if end_s is None else now_ns + int(end_s * 1e9)
    if known is not None and late == was_late and bool(known.end_unix_ns) == bool(end_unix_ns):
        moved_s = abs(end_unix_ns - known.end_unix_ns) / 1e9
        if end_s is None or moved_s <= max(MOVED * end_s, MIN_S):
            return None
    return Foretold(end_unix_ns=end_unix_ns, late=late)
