"""What has become of each job: the fold of its events. Pure; the same events twice change nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.deal import Standing

MAX_JOBS = 10_000
"""Jobs that are remembered; beyond it the oldest finished ones are forgotten. Unfinished ones have a bound where they
are taken (`view.py`)."""

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
    dealt_shares: int = 0
    dealt_lines: int = 0
    foretold: pb.Foretold | None = None
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Lines completed and failed of each share, while the job runs."""
    completed_so_far: int = 0
    failed_so_far: int = 0

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
        return self.finished.completed if self.finished else self.completed_so_far

    @property
    def failed(self) -> int:
        """Lines that have an error for an answer."""
        return self.finished.failed if self.finished else self.failed_so_far

    @property
    def answered(self) -> bool:
        """Whether every line has its answer."""
        return self.started is not None and self.completed + self.failed >= self.started.lines

    def standing(self) -> Standing | None:
        """For dealing; None before it is counted, and once all of it is answered."""
        left = self.lines - self.completed - self.failed
        if self.finished is not None or not left:
            return None
        return Standing(
            job_id=self.id,
            tenant=self.created.tenant,
            priority=self.created.priority,
            created_unix_ns=self.created_unix_ns,
            expires_unix_ns=self.created.expires_unix_ns,
            open_lines=max(self.dealt_lines - self.completed - self.failed, 0),
            undealt_lines=self.lines - self.dealt_lines,
            stopped=bool(self.cancel_unix_ns),
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


class JobBook:
    """Jobs by id, in the order of their creation."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[str, Job] = {}

    def get(self, job_id: str) -> Job | None:
        """None: not known, or forgotten."""
        return self._jobs.get(job_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def apply(self, event: pb.JobEvent) -> Job | None:
        """Take an event; the job it is about, None where that is not known."""
        job = self._jobs.get(event.job_id)
        kind = event.WhichOneof("event")
        if kind == "created":
            if job is None:
                job = self._jobs[event.job_id] = Job(event.job_id, event.created, event.at_unix_ns)
                self._forget()
            return job
        if job is None:
            return None
        match kind:
            case "started" if job.started is None:
                job.started, job.started_unix_ns = event.started, event.at_unix_ns
            case "dealt" if event.dealt.shares > job.dealt_shares:
                job.dealt_shares, job.dealt_lines = event.dealt.shares, event.dealt.lines
            case "foretold":
                job.foretold = event.foretold
            case "progress" if job.finished is None:
                _progress(job, event)
            case "cancel_asked" if not job.cancel_unix_ns:
                job.cancel_unix_ns = event.at_unix_ns
            case "finished" if job.finished is None:
                job.finished, job.finished_unix_ns = event.finished, event.at_unix_ns
                job.shares.clear()
            case _:
                pass
        return job

    def _forget(self) -> None:
        if len(self._jobs) > self._max_jobs:
            oldest = next((job_id for job_id, job in self._jobs.items() if job.finished), None)
            if oldest is not None:
                del self._jobs[oldest]


def _progress(job: Job, event: pb.JobEvent) -> None:
    """Counts are of the share so far: an older one, read late or twice, takes nothing back."""
    progress = event.progress
    completed, failed = job.shares.get(progress.share, (0, 0))
    if progress.completed + progress.failed > completed + failed:
        job.completed_so_far += progress.completed - completed
        job.failed_so_far += progress.failed - failed
        job.shares[progress.share] = (progress.completed, progress.failed)
        job.answered_unix_ns = event.at_unix_ns
