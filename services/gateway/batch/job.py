"""One job, as far as its events tell."""

from dataclasses import dataclass, field
from typing import Literal

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.policy.batch.deal import Standing
from services.gateway.batch.counts import Counts
from services.gateway.batch.reasons import NotRun, stopped

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_OUTCOMES: dict[int, Status] = {
    pb.OUTCOME_COMPLETED: "completed",
    pb.OUTCOME_CANCELLED: "cancelled",
    pb.OUTCOME_EXPIRED: "expired",
    pb.OUTCOME_FAILED: "failed",
}


@dataclass(slots=True)
class Job:
    """One job as far as its events tell."""

    id: str
    created: pb.Created
    created_unix_ns: int
    started: pb.Started | None = None
    started_unix_ns: int = 0
    cancel_unix_ns: int = 0
    finished: pb.Finished | None = None
    finished_unix_ns: int = 0
    answered_unix_ns: int = 0
    """When its last line so far was answered."""
    dealt: pb.Dealt = field(default_factory=pb.Dealt)
    foretold: pb.Foretold | None = None
    waits: pb.Waits | None = None
    assembled: pb.Assembled | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def input_file_id(self) -> str:
        """Where its lines are; empty while they are in a topic only."""
        return (self.started.input_file_id if self.started else "") or self.created.input_file_id

    @property
    def lines(self) -> int:
        """Of its file; 0 while they are not counted yet."""
        return self.started.lines if self.started else 0

    @property
    def completed(self) -> int:
        """Lines answered well."""
        return self.finished.completed if self.finished else self.counts.completed

    @property
    def failed(self) -> int:
        """Lines that have an error for an answer."""
        return self.finished.failed if self.finished else self.counts.failed

    @property
    def waits_for(self) -> str:
        """Why it does not go on now; empty where it does, and once it has ended."""
        return self.waits.reason if self.waits and self.finished is None else ""

    @property
    def answered(self) -> bool:
        """Whether every line has its answer."""
        return self.started is not None and self.completed + self.failed >= self.started.lines

    def stopped(self, now_ns: int) -> NotRun | None:
        """Why no more of its lines are run, if so."""
        return stopped(self.created.expires_unix_ns, now_ns, cancelled=bool(self.cancel_unix_ns))

    def standing(self, now_ns: int) -> Standing | None:
        """For dealing; None before it is counted, and once all of it is answered."""
        left = self.lines - self.completed - self.failed
        if self.finished is not None or not left:
            return None
        is_stopped = self.stopped(now_ns) is not None
        return Standing(
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
        """In the API's words."""
        if self.finished is not None:
            return _OUTCOMES.get(self.finished.outcome, "failed")
        if self.cancel_unix_ns:
            return "cancelling"
        if self.started is None:
            return "validating"
        return "finalizing" if self.answered else "in_progress"
