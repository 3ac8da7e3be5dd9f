"""What has become of each job: the fold of its events. Pure; the same events twice change nothing."""

from collections import deque
from collections.abc import Iterator

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.counts import Counts
from services.gateway.batch.job import Job
from services.gateway.batch.kept import revive

MAX_JOBS = 10_000
"""Jobs that are remembered; beyond it the oldest finished ones are forgotten. Unfinished ones have a bound where they
are taken (`view.py`)."""
MAX_EARLY = 10_000
"""Events of jobs that are not known yet. A job is kept in one event a moment after it was looked at; what was published
meanwhile comes before it, for who begins to read there."""


class JobBook:
    """Jobs by id, in the order in which they became known."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[str, Job] = {}
        self._early: deque[pb.JobEvent] = deque(maxlen=MAX_EARLY)

    def get(self, job_id: str) -> Job | None:
        """None: not known, or forgotten."""
        return self._jobs.get(job_id)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def apply(self, event: pb.JobEvent) -> Job | None:
        """Take an event; the job it is about, None where that is not known."""
        job = self._jobs.get(event.job_id)
        match event.WhichOneof("event"):
            case "created" if job is None:
                job = self._add(Job(event.job_id, event.created, event.at_unix_ns))
            case "kept" if job is None:
                job = self._add(revive(event.job_id, event.kept))
                early, self._early = self._early, deque(maxlen=MAX_EARLY)
                for earlier in early:
                    if earlier.job_id == job.id:
                        _apply(job, earlier)
                    else:
                        self._early.append(earlier)
            case _ if job is not None:
                _apply(job, event)
            case _:
                self._early.append(event)
        return job

    def _add(self, job: Job) -> Job:
        self._jobs[job.id] = job
        if len(self._jobs) > self._max_jobs:
            oldest = next((job_id for job_id, other in self._jobs.items() if other.finished), None)
            if oldest is not None:
                del self._jobs[oldest]
        return job


def _apply(job: Job, event: pb.JobEvent) -> None:
    match event.WhichOneof("event"):
        case "started" if job.started is None:
            job.started, job.started_unix_ns = event.started, event.at_unix_ns
        case "dealt" if event.dealt.shares > job.dealt.shares:
            job.dealt = event.dealt
        case "foretold":
            job.foretold = event.foretold
        case "assembled" if assembled_lines(event.assembled) > assembled_lines(job.assembled):
            job.assembled = event.assembled
        case "progress" if job.finished is None and job.counts.add(event.progress):
            job.answered_unix_ns = event.at_unix_ns
        case "cancel_asked" if not job.cancel_unix_ns:
            job.cancel_unix_ns = event.at_unix_ns
        case "finished" if job.finished is None:
            job.finished, job.finished_unix_ns = event.finished, event.at_unix_ns
            job.counts, job.assembled = Counts(), None
        case _:
            pass


def assembled_lines(assembled: pb.Assembled | None) -> int:
    """Lines whose answers are in files that stay."""
    return assembled.output.lines + assembled.errors.lines if assembled else 0
