"""The newest messages for any number of readers, each at its own pace; a slow reader skips."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

from libs.contracts.errors import QueueFull
from libs.policy.limits.slots import may_take

MAX_READERS: Final = 64
KEPT_TICKS: Final = 32
"""Ticks that are kept; a reader that is further behind continues with the newest."""
RETRY_AFTER_S: Final = 10.0


class Hub:
    """The messages of one writer, shared by all readers."""

    def __init__(self) -> None:
        self._ticks: deque[bytes] = deque(maxlen=KEPT_TICKS)
        self._written = 0
        self._members = b""
        self._members_from = 0
        """Number of the tick that the present members came with."""
        self._news = asyncio.Event()
        self._closed = False
        self._readers: Counter[str] = Counter()
        """Number of readers by caller."""
        self.close_readers = 0
        """Number of readers that want changes between two windows."""
        self.skipped_ticks = 0
        """Ticks that readers did not get because they were slow."""

    def publish(self, tick: bytes, members: bytes | None = None) -> None:
        """Hand a tick to every reader, preceded by `members` if those have changed."""
        if members is not None:
            self._members, self._members_from = members, self._written
        self._ticks.append(tick)
        self._written += 1
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    @property
    def readers(self) -> int:
        return self._readers.total()

    def check_room(self, caller: str = "") -> None:
        """Raise QueueFull when no more readers are admitted, or none of this caller, who leaves room to others.

        `caller` is a key's id, empty where no key is needed.
        """
        if self.readers >= MAX_READERS:
            raise QueueFull(f"{MAX_READERS} readers hold the stream already", retry_after_s=RETRY_AFTER_S)
        own = self._readers[caller]
        if caller and not may_take(MAX_READERS, self.readers, own):
            text = f"{own} of {MAX_READERS} readers of the stream have this key already: others need room too"
            raise QueueFull(text, retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def reader(self, caller: str = "", *, between: bool = True) -> Iterator[AsyncIterator[bytes]]:
        """Yield messages from the newest on until `close`, holding a place while the context is open.

        `caller` is that of `check_room`. With `between`, changes between two windows come at once. Without any such
        reader they come with the next window.
        """
        self.check_room(caller)
        self._readers[caller] += 1
        self.close_readers += between
        try:
            yield self._read()
        finally:
            self._readers[caller] -= 1
            if not self._readers[caller]:
                del self._readers[caller]
            self.close_readers -= between

    async def _read(self) -> AsyncIterator[bytes]:
        sent_members, following = -1, max(self._written - 1, 0)
        while not self._closed:
            if following == self._written:
                await self._news.wait()
                continue
            if following < self._written - len(self._ticks):
                self.skipped_ticks += self._written - 1 - following
                following = self._written - 1
            if sent_members != self._members_from <= following:
                sent_members = self._members_from
                yield self._members
                continue  # many ticks may have been written while this was sent
            tick = self._ticks[following - self._written]
            following += 1
            yield tick

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
