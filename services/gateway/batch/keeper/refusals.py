"""Answers to lines of a stopped job that no runner has yet: its keeper gives them, at once and for nothing.

As shares they would wait in their lanes behind lines of other jobs, which cost capacity.
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

SHARES_AT_ONCE = 4
"""Shares of one job refused in one transaction; each is read whole."""


@dataclass(frozen=True, slots=True)
class RefusedShares:
    """The next shares of a job, answered. Without lines once all of them have been dealt."""

    dealt: pb.JobEvent
    produced: list[Produced]
    """In one transaction with `dealt`: results, and the progress that counts them."""
    copies: list[Produced]
    """For topics of the client's."""
    lines: int


class Refusals:
    """Refuses undealt shares of stopped jobs, for one keeper."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._copies = Copies()

    async def next(self, dealer: Dealer, reason: NotRun, now_ns: int) -> RefusedShares | None:
        """None: there are no more. Raises StoreUnavailable."""
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
        """The client's topic takes none: from now on there are none for it."""
        self._copies.refuse(job_id, error)
