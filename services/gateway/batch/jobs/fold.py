"""The state of each job, folded from its events. Pure; applying an event twice changes nothing."""

from collections import Counter
from collections.abc import Iterator

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.jobs.progress import ShareCounts


def snapshot(job: Job) -> pb.Snapshot:
    counts = job.counts
    return pb.Snapshot(
        created=job.created,
        created_unix_ns=job.created_unix_ns,
        started=job.started,
        started_unix_ns=job.started_unix_ns,
        dealt=job.dealt,
        foretold=job.expected_end,
        waits=job.waits,
        assembled=job.assembled,
        cancel_unix_ns=job.cancel_unix_ns,
        finished=job.finished,
        finished_unix_ns=job.finished_unix_ns,
        completed=counts.completed,
        failed=counts.failed,
        answered_unix_ns=job.answered_unix_ns,
        open_shares=[progress for _, progress in sorted(counts.open.items())],
        whole_below=counts.whole_below,
        whole_above=[progress for _, progress in sorted(counts.whole_above.items())],
    )


def revive(job_id: str, stored: pb.Snapshot) -> Job:
    return Job(
        id=job_id,
        created=stored.created,
        created_unix_ns=stored.created_unix_ns,
        started=stored.started if stored.HasField("started") else None,
        started_unix_ns=stored.started_unix_ns,
        cancel_unix_ns=stored.cancel_unix_ns,
        finished=stored.finished if stored.HasField("finished") else None,
        finished_unix_ns=stored.finished_unix_ns,
        answered_unix_ns=stored.answered_unix_ns,
        dealt=stored.dealt,
        waits=stored.waits if stored.HasField("waits") else None,
        expected_end=stored.foretold if stored.HasField("foretold") else None,
        assembled=stored.assembled if stored.HasField("assembled") else None,
        counts=ShareCounts(
            completed=stored.completed,
            failed=stored.failed,
            open={progress.share: progress for progress in stored.open_shares},
            whole_below=stored.whole_below,
            whole_above={progress.share: progress for progress in stored.whole_above},
        ),
    )


MAX_JOBS = 10_000
"""Jobs kept in memory. Beyond it the tenant with most finished ones loses its oldest; where none is finished the new
one is dropped. `view.py` bounds the unfinished ones that gateways accept."""
MAX_EARLY = 10_000
"""Events kept for jobs that are not known yet. A snapshot is published a moment after it was taken, so a reader that
begins there reads the events of that moment before the snapshot."""


class JobBook:
    """Jobs by id, in the order in which they became known."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[str, Job] = {}
        self._early: dict[str, list[pb.JobEvent]] = {}
        self._early_events = 0
        self.dropped = 0
        """Events of unknown jobs that were dropped beyond `MAX_EARLY`, and unfinished jobs beyond `MAX_JOBS`."""

    def get(self, job_id: str) -> Job | None:
        """The job; None where it is unknown or was dropped."""
        return self._jobs.get(job_id)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def apply(self, event: pb.JobEvent) -> Job | None:
        """Apply an event and return its job; None where the job is not known."""
        job = self._jobs.get(event.job_id)
        match event.WhichOneof("event"):
            case "created" if job is None:
                job = self._add(Job(event.job_id, event.created, event.at_unix_ns))
            case "snapshot" if job is None:
                job = self._add(revive(event.job_id, event.snapshot))
            case "snapshot" if job is not None:
                # A repeated `created` made the job known before its snapshot.
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

    def _add(self, job: Job) -> Job | None:
        early = self._early.pop(job.id, [])
        self._early_events -= len(early)
        for event in early:
            _apply(job, event)
        self._jobs[job.id] = job
        if len(self._jobs) > self._max_jobs:
            self._drop_one(job)
        return self._jobs.get(job.id)

    def _drop_one(self, new: Job) -> None:
        """Drop the oldest finished job of the tenant that has most of them, or `new` where none is finished."""
        finished = [job for job in self._jobs.values() if job.finished]
        if not finished:  # no gateway accepts so many that are not finished
            self.dropped += 1
            del self._jobs[new.id]
            return
        most, _ = Counter(job.created.tenant for job in finished).most_common(1)[0]
        del self._jobs[next(job.id for job in finished if job.created.tenant == most)]


def _apply(job: Job, event: pb.JobEvent) -> None:
    match event.WhichOneof("event"):
        case "started" if job.started is None:
            job.started, job.started_unix_ns = event.started, event.at_unix_ns
        case "dealt" if event.dealt.shares > job.dealt.shares:
            job.dealt = event.dealt
        case "foretold":
            job.expected_end = event.foretold
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
            job.counts, job.assembled = ShareCounts(), None
        case _:
            pass


def _merge(job: Job, stored: Job) -> None:
    """Add what a snapshot's job, `stored`, knows beyond the events that were read."""
    job.created, job.created_unix_ns = stored.created, stored.created_unix_ns
    if job.started is None:
        job.started, job.started_unix_ns = stored.started, stored.started_unix_ns
    if stored.dealt.shares > job.dealt.shares:
        job.dealt = stored.dealt
    job.expected_end = job.expected_end or stored.expected_end
    job.waits = stored.waits if job.waits is None else job.waits
    job.cancel_unix_ns = job.cancel_unix_ns or stored.cancel_unix_ns
    if job.finished is None:
        job.finished, job.finished_unix_ns = stored.finished, stored.finished_unix_ns
    if job.finished is not None:
        job.counts, job.assembled = ShareCounts(), None
        return
    if stored.assembled is not None and _further(stored.assembled, job.assembled):
        job.assembled = stored.assembled
    job.counts = job.counts.merged(stored.counts)
    job.answered_unix_ns = job.answered_unix_ns or stored.answered_unix_ns


def _further(new: pb.Assembled, known: pb.Assembled | None) -> bool:
    """Whether `new` has more answers in files, or belongs to a later attempt."""
    return known is None or _extent(new) > _extent(known)


def _extent(assembled: pb.Assembled) -> tuple[int, int]:
    return assembled.attempt, assembled.output.lines + assembled.errors.lines
