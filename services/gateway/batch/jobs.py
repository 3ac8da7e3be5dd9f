"""What has become of each job: the fold of its events. Pure; the same events twice change nothing."""

from collections.abc import Iterator

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.counts import Counts
from services.gateway.batch.job import Job
from services.gateway.batch.snapshot import revive

MAX_JOBS = 10_000
"""Jobs that are remembered; beyond it the oldest finished ones are forgotten. Unfinished ones have a bound where they
are taken (`view.py`)."""
MAX_EARLY = 10_000
"""Events of jobs that are not known yet. A job's snapshot is published a moment after it was taken; what was published
meanwhile comes before it, for who begins to read there."""


class JobBook:
    """Jobs by id, in the order in which they became known."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[str, Job] = {}
        self._early: dict[str, list[pb.JobEvent]] = {}
        self._early_events = 0
        self.dropped = 0
        """Events of jobs that are not known, for which there was no room."""

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
            case "snapshot" if job is None:
                job = self._add(revive(event.job_id, event.snapshot))
            case "snapshot" if job is not None:
                # It became known by a `created` that came again.
                _merge(job, revive(event.job_id, event.snapshot))
            case _ if job is not None:
                _apply(job, event)
            case _:
                self._wait(event)
        return job

    def _wait(self, event: pb.JobEvent) -> None:
        if self._early_events >= MAX_EARLY:
            oldest = self._early.pop(next(iter(self._early)))
            self._early_events -= len(oldest)
            self.dropped += len(oldest)
        self._early.setdefault(event.job_id, []).append(event)
        self._early_events += 1

    def _add(self, job: Job) -> Job:
        early = self._early.pop(job.id, [])
        self._early_events -= len(early)
        for event in early:
            _apply(job, event)
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
        case "waits":
            job.waits = event.waits
        case "assembled" if job.finished is None and _further(event.assembled, job.assembled):
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


def _merge(job: Job, told: Job) -> None:
    """What a snapshot knows more than the events that were read."""
    job.created, job.created_unix_ns = told.created, told.created_unix_ns
    if job.started is None:
        job.started, job.started_unix_ns = told.started, told.started_unix_ns
    if told.dealt.shares > job.dealt.shares:
        job.dealt = told.dealt
    job.foretold = job.foretold or told.foretold
    job.waits = told.waits if job.waits is None else job.waits
    job.cancel_unix_ns = job.cancel_unix_ns or told.cancel_unix_ns
    if job.finished is None:
        job.finished, job.finished_unix_ns = told.finished, told.finished_unix_ns
    if job.finished is not None:
        job.counts, job.assembled = Counts(), None
        return
    if told.assembled is not None and _further(told.assembled, job.assembled):
        job.assembled = told.assembled
    job.counts = job.counts.merged(told.counts)
    job.answered_unix_ns = job.answered_unix_ns or told.answered_unix_ns


def _further(told: pb.Assembled, known: pb.Assembled | None) -> bool:
    """Whether it tells of more answers that are in files, or of a later attempt at that."""
    return known is None or _extent(told) > _extent(known)


def _extent(assembled: pb.Assembled) -> tuple[int, int]:
    return assembled.attempt, assembled.output.lines + assembled.errors.lines
