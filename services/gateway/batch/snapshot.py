"""A job in one event, so that those before it need not be read again. Pure."""

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.counts import Counts
from services.gateway.batch.job import Job


def snapshot(job: Job) -> pb.Snapshot:
    """All that its events have told."""
    counts = job.counts
    return pb.Snapshot(
        created=job.created,
        created_unix_ns=job.created_unix_ns,
        started=job.started,
        started_unix_ns=job.started_unix_ns,
        dealt=job.dealt,
        foretold=job.foretold,
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


def revive(job_id: str, told: pb.Snapshot) -> Job:
    """The job again."""
    return Job(
        id=job_id,
        created=told.created,
        created_unix_ns=told.created_unix_ns,
        started=told.started if told.HasField("started") else None,
        started_unix_ns=told.started_unix_ns,
        cancel_unix_ns=told.cancel_unix_ns,
        finished=told.finished if told.HasField("finished") else None,
        finished_unix_ns=told.finished_unix_ns,
        answered_unix_ns=told.answered_unix_ns,
        dealt=told.dealt,
        waits=told.waits if told.HasField("waits") else None,
        foretold=told.foretold if told.HasField("foretold") else None,
        assembled=told.assembled if told.HasField("assembled") else None,
        counts=Counts(
            completed=told.completed,
            failed=told.failed,
            open={progress.share: progress for progress in told.open_shares},
            whole_below=told.whole_below,
            whole_above={progress.share: progress for progress in told.whole_above},
        ),
    )
