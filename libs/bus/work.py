"""The port to work that must be done once: partitions dealt out to members of a group, each worked on in transactions.

A separate port from `Bus`, whose publishing is allowed to lose and to repeat.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from libs.bus.port import Record
from libs.contracts.topics import Topic

MAX_NOTE_CHARS = 4096
"""What a broker keeps beside an offset, by default."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A record for a topic that is a client's, and made by it: bytes as they are."""

    topic: str
    """Its whole name on the broker."""
    key: bytes
    value: bytes


Produced = tuple[Topic, Message] | Raw
"""What a transaction can hold."""


class Lane(Protocol):
    """One partition of a topic of work, for as long as this member has it. Whoever had it before can commit no more."""

    @property
    def partition(self) -> int:
        """Its number."""
        ...

    @property
    def note(self) -> str:
        """What was committed with the offset at which it begins."""
        ...

    @property
    def end(self) -> int:
        """Where it ended when it began: others may have worked on what is before that."""
        ...

    @property
    def replayed(self) -> bool:
        """Whether all has been read that was there when the lane began."""
        ...

    def batches(self) -> AsyncIterator[list[Record]]:
        """Records from the committed offset on, as they come; an empty list when none came for a moment."""
        ...

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        """One transaction: these records, and that the next to be worked on is at `next_offset`, with a note.

        Raises TopicRefused when a client's topic does not take its records, TooLargeForTopic where one of them is too
        large for it: nothing is committed then, and the lane
        can go on without them. Raises anything else when it cannot be known, or is not true, that it was committed: the
        lane is then of no more use, and the next one begins where the broker says. One at a time.
        """
        ...


Handle = Callable[[Lane], Coroutine[Any, Any, None]]
"""Works on one lane until it is cancelled, which it is when the lane goes to another member."""


class WorkBus(Protocol):
    """Work over Kafka."""

    async def send(self, topic: Topic, value: Message) -> None:
        """Publish, and wait until the broker has it; raises BrokerUnavailable."""
        ...

    async def ends(self, topic: Topic) -> list[int]:
        """The offset after the last record of each partition; raises BrokerUnavailable."""
        ...

    async def trim(self, topic: Topic, before: Sequence[int]) -> None:
        """Have the broker delete records below these offsets, by partition; raises BrokerUnavailable."""
        ...

    async def committed(self, topic: Topic, group: str) -> list[int]:
        """Where the group's lane of each partition begins, 0 where nothing was committed; raises BrokerUnavailable."""
        ...

    def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        """Committed records of all partitions, from `since` or else from the start, through outages.

        `on_replayed`: called once, when all has been read that was there at the beginning.
        """
        ...

    def values(self, name: str) -> AsyncIterator[bytes]:
        """Committed values of a client's topic, partition by partition, up to where it ended when this was asked.

        Raises TopicNotFound, and BrokerUnavailable at any moment.
        """
        ...

    async def check_topic(self, name: str, *, param: str) -> None:
        """Raises TopicNotFound, that names `param`, when there is no such topic; BrokerUnavailable. Makes none."""
        ...

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        """Be a member of the group until cancelled: `handle` runs once for each partition it has, through outages."""
        ...
