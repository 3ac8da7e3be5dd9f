from dataclasses import dataclass, field
from typing import Literal

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.policy.batch import OpenJob
from services.gateway.batch.jobs.progress import ShareCounts
from services.gateway.batch.jobs.reasons import NotRun, stopped

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_OUTCOMES: dict[int, Status] = {
    pb.OUTCOME_COMPLETED: "completed",
    pb.OUTCOME_CANCELLED: "cancelled",
    pb.OUTCOME_EXPIRED: "expired",
    pb.OUTCOME_FAILED: "failed",
}


@dataclass(slots=True)
class Job:
    """The state of one job, as folded from its events."""

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
        """Return the file that holds the job's lines; empty while they are only in a topic."""
        return (self.started.input_file_id if self.started else "") or self.created.input_file_id

    @property
    def lines(self) -> int:
        """Return the number of lines in the job's file; 0 until they are counted."""
        return self.started.lines if self.started else 0

    @property
    def completed(self) -> int:
        """Return the number of lines answered without an error."""
        return self.finished.completed if self.finished else self.counts.completed

    @property
    def failed(self) -> int:
        """Return the number of lines answered with an error."""
        return self.finished.failed if self.finished else self.counts.failed

    @property
    def waits_for(self) -> str:
        """Return the reason why the job waits; empty while it runs and after its end."""
        return self.waits.reason if self.waits and self.finished is None else ""

    @property
    def answered(self) -> bool:
        return self.started is not None and self.completed + self.failed >= self.started.lines

    def stopped(self, now_ns: int) -> NotRun | None:
        """Return the reason why no more of its lines run, or None while they do."""
        return stopped(self.created.expires_unix_ns, now_ns, cancelled=bool(self.cancel_unix_ns))

    def standing(self, now_ns: int) -> OpenJob | None:
        """Return the job's entry for dealing; None before its lines are counted and after all are answered."""
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
