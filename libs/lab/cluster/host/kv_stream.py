"""KV on its way from one worker to another over the receiver's link, as blocks get ready.

The sender's side is not modelled.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from libs.engine.kv.handles import Held
from libs.lab.cluster.sequence import CountedSequence
from libs.lab.cluster.time import VirtualTime

MAX_FETCHES: Final = 64
"""Sequences at a time whose KV a worker receives, as `libs.engine.local` bounds them."""


@dataclass(eq=False, slots=True)
class Stream:
    """The blocks of one sequence."""

    sequence: CountedSequence
    held: Held
    at: int
    """Blocks that are here, or on the link."""
    asked_ns: int
    open: bool = False
    """Whether the source knows by now that they are wanted."""
    moving: bool = False
    first: int = 0
    """Blocks that were found here."""

    @property
    def ready(self) -> int:
        """Blocks at the source that could be sent."""
        return self.held.ready - self.at

    @property
    def done(self) -> bool:
        """Whether all has come."""
        return not self.moving and self.held.whole and self.at >= len(self.held.blocks)


class ReceivingLink:
    """One worker's. All that it receives at a time takes turns on it, a block each, as pulls do live with chunks."""

    def __init__(self, time: VirtualTime, block_ps: int, arrived: Callable[[Stream], None]) -> None:
        """`arrived` is called when all has come that was on its way for a sequence."""
        self._time = time
        self._block_ps = block_ps
        self._arrived = arrived
        self._left: dict[Stream, int] = {}
        """Blocks on their way."""
        self._turns: deque[Stream] = deque()
        """A block of the first one is on the link."""
        self._since_ps = 0
        """From when on."""
        self._plans = 0

    @property
    def moving(self) -> int:
        """Sequences whose blocks are on the link."""
        return len(self._turns)

    def pull(self, stream: Stream) -> None:
        """Send what is ready, beside what is on its way."""
        blocks = stream.ready
        if blocks <= 0:
            return
        self._pass()
        stream.at += blocks
        stream.moving = True
        if stream not in self._left:
            if not self._turns:
                self._since_ps = self._time.now_ps
            self._turns.append(stream)
        self._left[stream] = self._left.get(stream, 0) + blocks
        self._plan()

    def drop(self, stream: Stream) -> None:
        """The receiver no longer waits for it."""
        if stream in self._left:
            self._pass()
            if stream is self._turns[0]:
                self._since_ps = self._time.now_ps
            self._leave(stream)
            self._plan()

    def _leave(self, stream: Stream) -> None:
        del self._left[stream]
        self._turns.remove(stream)

    def _pass(self) -> None:
        """Blocks up to now have come; none of them was a sequence's last, but for those that are through just now."""
        if not self._turns:
            return
        blocks = (self._time.now_ps - self._since_ps) // self._block_ps
        self._since_ps += blocks * self._block_ps
        rounds, more = divmod(blocks, len(self._turns))
        for place, stream in enumerate(self._turns):
            self._left[stream] -= rounds + (place < more)
        self._turns.rotate(-more)

    def _plan(self) -> None:
        """Wake up when the next one is through, unless something changes before."""
        self._plans += 1
        if self._turns:
            blocks, place = min((self._left[stream], place) for place, stream in enumerate(self._turns))
            before = (blocks - 1) * len(self._turns) + place + 1 if blocks else 0
            self._time.at_ps(self._since_ps + before * self._block_ps, partial(self._come, self._plans))

    def _come(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._pass()
        here = [stream for stream in self._turns if not self._left[stream]]
        for stream in here:
            self._leave(stream)
            stream.moving = False
        self._plan()
        for stream in here:
            self._arrived(stream)
