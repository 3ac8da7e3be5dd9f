"""The port to work that must be done once: partitions assigned to members of a group, processed in transactions.

It is separate from `Bus`, whose publishing may lose and repeat records.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from libs.bus.port import Record
from libs.contracts.topics import Topic


@dataclass(frozen=True, slots=True)
class Raw:
    """A record in the client's own format, for a topic of that client."""

    topic: str
    """The full name of the topic on the broker."""
    key: bytes
    value: bytes


Produced = tuple[Topic, Message] | Raw
"""The records that a transaction can hold."""


class Lane(Protocol):
    """One partition of a topic of work, while this member owns it. Its former owner can no longer commit."""

    @property
    def partition(self) -> int: ...

    @property
    def note(self) -> str:
        """The note committed with the offset at which the lane begins."""
        ...

    @property
    def end(self) -> int:
        """The end of the partition when the lane began. Others may have worked on the records before it."""
        ...

    @property
    def replayed(self) -> bool:
        """Return whether all records that existed when the lane began have been read."""
        ...

    def batches(self) -> AsyncIterator[list[Record]]:
        """Yield records as they arrive, from the committed offset on. The list is empty if none arrived for a
        moment.
        """
        ...

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        """Commit these records, a note, and `next_offset` as the next offset to process, in one transaction. A lane has
        one transaction at a time.

        Raise TopicRefused if a client's topic does not accept its records, and TooLargeForTopic if one of them is
        too large for it. Nothing is committed in these cases, and the lane can continue without the records. After any
        other error the transaction was not committed, or its outcome is unknown. The lane is then unusable, and the
        next one begins at the offset that the broker reports.
        """
        ...


Handle = Callable[[Lane], Coroutine[Any, Any, None]]
"""A function that works on one lane until cancelled, because another member takes over the lane."""


class WorkBus(Protocol):
    """Publishing, reading and processing of records that must neither be lost nor repeated."""

    async def send(self, topic: Topic, value: Message) -> None:
        """Publish and wait for the broker's confirmation. Raise BrokerUnavailable."""
        ...

    async def ends(self, topic: Topic) -> list[int]:
        """Return the offset after the last record of each partition. Raise BrokerUnavailable."""
        ...

    async def trim(self, topic: Topic, before: Sequence[int]) -> None:
        """Delete the records below these offsets, by partition. Raise BrokerUnavailable."""
        ...

    async def committed(self, topic: Topic, group: str) -> list[int]:
        """Return the offset at which the group's lane of each partition begins; 0 if nothing was committed. Raise
        BrokerUnavailable.
        """
        ...

    def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        """Yield committed records of all partitions, from `since` or else from the start, continuing through outages.

        `on_replayed` is called once all records that existed at the beginning have been read.
        """
        ...

    def values(self, name: str) -> AsyncIterator[bytes]:
        """Yield committed values of a client's topic by partition, up to its end at the time of the call.

        Raise TopicNotFound, and BrokerUnavailable at any moment.
        """
        ...

    async def check_topic(self, name: str, *, param: str) -> None:
        """Raise TopicNotFound, which names `param`, if the topic does not exist, or BrokerUnavailable. Never creates
        topics.
        """
        ...

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        """Process partitions as a member of the group until cancelled, and rejoin after outages. `handle` runs once for
        each assigned partition.
        """
        ...
