"""A job in one event, so that those before it need not be read again. Pure."""

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.counts import Counts
from services.gateway.batch.job import Job


def keep(job: Job) -> pb.Kept:
    """All that its events have told."""
    counts = job.counts
    return pb.Kept(
        created=job.created,
        created_unix_ns=job.created_unix_ns,
        started=job.started,
        started_unix_ns=job.started_unix_ns,
        dealt=job.dealt,
        foretold=job.foretold,
        assembled=job.assembled,
        cancel_unix_ns=job.cancel_unix_ns,
        finished=job.finished,
        finished_unix_ns=job.finished_unix_ns,
        completed=counts.completed,
        failed=counts.failed,
        answered_unix_ns=job.answered_unix_ns,
        open_shares=[progress for _, progress in sorted(counts.open.items())],
        whole_below=counts.whole_below,
        whole_above=sorted(counts.whole_above),
    )


def revive(job_id: str, kept: pb.Kept) -> Job:
    """The job again."""
    return Job(
        id=job_id,
        created=kept.created,
        created_unix_ns=kept.created_unix_ns,
        started=kept.started if kept.HasField("started") else None,
        started_unix_ns=kept.started_unix_ns,
        cancel_unix_ns=kept.cancel_unix_ns,
        finished=kept.finished if kept.HasField("finished") else None,
        finished_unix_ns=kept.finished_unix_ns,
        answered_unix_ns=kept.answered_unix_ns,
        dealt=kept.dealt,
        foretold=kept.foretold if kept.HasField("foretold") else None,
        assembled=kept.assembled if kept.HasField("assembled") else None,
        counts=Counts(
            completed=kept.completed,
            failed=kept.failed,
            open={progress.share: progress for progress in kept.open_shares},
            whole_below=kept.whole_below,
            whole_above=set(kept.whole_above),
        ),
    )
