"""Snapshots of jobs as single events, which let readers skip all earlier events. Pure."""

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.jobs.counts import ShareCounts
from services.gateway.batch.jobs.job import Job


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
