"""Answers that go to topics of the client's as well, and jobs whose topics do not take them."""

from collections import Counter
from collections.abc import Iterable

from libs.bus.work import Raw, WorkBus
from libs.contracts.errors import TooLargeForTopic, TopicRefused
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created, Result, Share
from services.gateway.batch.jobs.reasons import OutputRefused
from services.gateway.batch.lines.answers import stand_in

MAX_REFUSED = 1_000
"""Jobs that are remembered; one that is forgotten is found out again."""
MAX_TOO_LARGE = 20
"""Answers of a job one after the other, after which a topic that is too small for them is taken to refuse all: each
costs its lane a new producer."""


async def check_topics(bus: WorkBus, created: Created) -> None:
    """Raises TopicNotFound that names the field, BrokerUnavailable."""
    for field in ("output_topic", "error_topic"):
        if name := getattr(created, field):
            await bus.check_topic(name, param=field)


class Copies:
    """Copies one gateway's answers to the topics that its jobs name."""

    def __init__(self) -> None:
        self._refused: dict[str, OutputRefused] = {}
        self._too_large: Counter[str] = Counter()
        """Answers too large for their topic since the last one that it took, by job."""

    def of(self, share: Share, results: Iterable[Result]) -> list[Raw]:
        """What is committed with the results."""
        if share.job_id in self._refused:
            return []
        found = [(share.output_topic if result.ok else share.error_topic, result) for result in results]
        return [Raw(topic, result.custom_id.encode(), result.answer) for topic, result in found if topic]

    def stand_ins(self, share: Share, results: Iterable[Result], error: TooLargeForTopic) -> list[Raw]:
        """What is committed with results whose copies are too large: an error for each, if errors go to a topic."""
        if share.job_id in self._refused or not share.error_topic:
            return []
        return [Raw(share.error_topic, result.custom_id.encode(), stand_in(result, error)) for result in results]

    def taken(self, job_id: str) -> None:
        """Record that a job's topics took its answers, or that there were none to take."""
        self._too_large.pop(job_id, None)

    def too_large(self, job_id: str) -> bool:
        """Count an answer too large for its topic; returns whether the topic now counts as refusing all answers."""
        self._too_large[job_id] += 1
        if len(self._too_large) > MAX_REFUSED:
            del self._too_large[next(iter(self._too_large))]
        return self._too_large[job_id] > MAX_TOO_LARGE

    def refuse(self, job_id: str, error: TopicRefused) -> None:
        """The job's answers are in its files alone from now on, and no more of its lines are run."""
        self._refused[job_id] = OutputRefused(error.message)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refused(self, job_id: str) -> OutputRefused | None:
        """Why no more of its lines are run."""
        return self._refused.get(job_id)
