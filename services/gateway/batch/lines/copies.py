"""Copies of answers for clients' topics, and the jobs whose topics refuse them."""

from collections import Counter
from collections.abc import Iterable

from libs.bus.work import Raw, WorkBus
from libs.contracts.errors import TooLargeForTopic, TopicRefused
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created, Result, Share
from services.gateway.batch.jobs.reasons import OutputRefused
from services.gateway.batch.lines.answers import stand_in

# Bound on remembered jobs; a forgotten one is detected again.
MAX_REFUSED = 1_000
# After this many oversized answers in a row, a topic counts as refusing all: each costs its lane a new producer.
MAX_TOO_LARGE = 20


async def check_topics(bus: WorkBus, created: Created) -> None:
    """Raise TopicNotFound that names the field, or BrokerUnavailable."""
    for field in ("output_topic", "error_topic"):
        if name := getattr(created, field):
            await bus.check_topic(name, param=field)


class Copies:
    """The copies of one gateway's answers to the topics that its jobs name."""

    def __init__(self) -> None:
        self._refused: dict[str, OutputRefused] = {}
        self._too_large: Counter[str] = Counter()
        """The answers, by job, that were too large for their topic since the last one that it took."""

    def of(self, share: Share, results: Iterable[Result]) -> list[Raw]:
        """Return the copies that are committed with the results."""
        if share.job_id in self._refused:
            return []
        found = [(share.output_topic if result.ok else share.error_topic, result) for result in results]
        return [Raw(topic, result.custom_id.encode(), result.answer) for topic, result in found if topic]

    def stand_ins(self, share: Share, results: Iterable[Result], error: TooLargeForTopic) -> list[Raw]:
        """Return an error for each result whose copy is too large, if the job's errors go to a topic."""
        if share.job_id in self._refused or not share.error_topic:
            return []
        return [Raw(share.error_topic, result.custom_id.encode(), stand_in(result, error)) for result in results]

    def taken(self, job_id: str) -> None:
        """Record that a job's topics took its answers, or that there were none to take."""
        self._too_large.pop(job_id, None)

    def too_large(self, job_id: str) -> bool:
        """Count an answer too large for its topic; return whether the topic now counts as refusing all answers."""
        self._too_large[job_id] += 1
        if len(self._too_large) > MAX_REFUSED:
            del self._too_large[next(iter(self._too_large))]
        return self._too_large[job_id] > MAX_TOO_LARGE

    def refuse(self, job_id: str, error: TopicRefused) -> None:
        """Keep the job's answers in its files alone and stop running its lines."""
        self._refused[job_id] = OutputRefused(error.message)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refused(self, job_id: str) -> OutputRefused | None:
        """Return the reason why no more of the job's lines run, if there is one."""
        return self._refused.get(job_id)
