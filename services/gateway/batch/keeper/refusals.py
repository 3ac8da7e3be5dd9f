"""Answers by the keeper to a stopped job's lines that no runner has yet, at once and without capacity.

As shares they would wait in their lanes behind lines of other jobs.
"""

from dataclasses import dataclass

from libs.bus.work import Produced
from libs.contracts.errors import TopicRefused
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.port import FileStore
from services.gateway.batch.jobs.reasons import NotRun
from services.gateway.batch.keeper.dealer import Dealer
from services.gateway.batch.lines.answers import refused
from services.gateway.batch.lines.copies import Copies
from services.gateway.batch.lines.reading import read_lines

# Shares of one job refused in one transaction; each is read whole.
SHARES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class RefusedShares:
    """The answers to a job's next shares; empty once all of them have been dealt."""

    dealt: pb.JobEvent
    produced: list[Produced]
    """The results and their progress, published in one transaction with `dealt`."""
    copies: list[Produced]
    """The copies for the client's topics."""
    lines: int


class Refusals:
    """The answers to undealt shares of stopped jobs, for one keeper."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._copies = Copies()

    async def next(self, dealer: Dealer, reason: NotRun, now_ns: int) -> RefusedShares | None:
        """Return the next answers, or None if no share is left. Raise StoreUnavailable."""
        spans = await dealer.next(SHARES_AT_ONCE)
        if not spans:
            return None
        produced: list[Produced] = []
        copies: list[Produced] = []
        for share in map(dealer.share, spans):
            lines = await read_lines(self._files, share)
            results = [refused(share.job_id, line, line.refusal or reason) for line in lines]
            counts = pb.Progress(share=share.number, failed=share.lines, whole=True)
            produced += [(BATCH_RESULTS, result) for result in results]
            produced.append((BATCH_JOBS, pb.JobEvent(job_id=share.job_id, at_unix_ns=now_ns, progress=counts)))
            copies += self._copies.of(share, results)
        dealt = pb.JobEvent(job_id=dealer.job.id, at_unix_ns=now_ns, dealt=dealer.dealt(spans))
        return RefusedShares(dealt, produced, copies, sum(span.lines for span in spans))

    def copies_refused(self, job_id: str, error: TopicRefused) -> None:
        """Stop copying the job's answers to a client's topic that refuses them."""
        self._copies.refuse(job_id, error)
