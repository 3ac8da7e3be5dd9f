"""Answers that go to topics of the client's as well, and jobs whose topics do not take them."""

from collections.abc import Iterable

from libs.bus.work import Raw, WorkBus
from libs.contracts.errors import TopicRefused
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created, Result, Share
from services.gateway.batch.reasons import OutputRefused

MAX_REFUSED = 1_000
"""Jobs that are remembered; one that is forgotten is found out again."""


async def check_topics(bus: WorkBus, created: Created) -> None:
    """Raises TopicNotFound that names the field, BrokerUnavailable."""
    for field in ("output_topic", "error_topic"):
        if name := getattr(created, field):
            await bus.check_topic(name, param=field)


class Copies:
    """Of one gateway's answers."""

    def __init__(self) -> None:
        self._refused: dict[str, OutputRefused] = {}

    def of(self, share: Share, results: Iterable[Result]) -> list[Raw]:
        """What is committed with the results."""
        if share.job_id in self._refused:
            return []
        found = [(share.output_topic if result.ok else share.error_topic, result) for result in results]
        return [Raw(topic, result.custom_id.encode(), result.answer) for topic, result in found if topic]

    def refuse(self, job_id: str, error: TopicRefused) -> None:
        """The job's answers are in its files alone from now on, and no more of its lines are run."""
        self._refused[job_id] = OutputRefused(error.message)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refused(self, job_id: str) -> OutputRefused | None:
        """Why no more of its lines are run."""
        return self._refused.get(job_id)
