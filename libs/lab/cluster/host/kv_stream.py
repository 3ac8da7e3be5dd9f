"""Transfers of KV between workers over the receiver's link, as blocks become ready.

The sender's side is not modelled.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from libs.engine.kv.blocks import Held
from libs.lab.cluster.sequence import CountedSequence
from libs.lab.cluster.time import VirtualTime

MAX_FETCHES: Final = 64
"""The most sequences whose KV a worker receives at a time, as bounded in `libs.engine.local`."""


@dataclass(eq=False, slots=True)
class Stream:
    """The transfer of one sequence's blocks to one receiver."""

    sequence: CountedSequence
    held: Held
    at: int
    """The number of blocks that have arrived or are on the link."""
    asked_ns: int
    open: bool = False
    """Whether the request for the blocks has reached the source."""
    moving: bool = False
    first: int = 0
    """The number of blocks found in the receiver's own cache."""

    @property
    def ready(self) -> int:
        """The number of blocks that the source could send now."""
        return self.held.ready - self.at

    @property
    def done(self) -> bool:
        """Whether the source has finished the prompt and all blocks have arrived."""
        return not self.moving and self.held.whole and self.at >= len(self.held.blocks)


class ReceivingLink:
    """The link of one receiver, on which concurrent streams take turns block by block, as live pulls do with chunks."""

    def __init__(self, time: VirtualTime, block_ps: int, arrived: Callable[[Stream], None]) -> None:
        """`arrived` is called when everything on its way for a sequence has arrived."""
        self._time = time
        self._block_ps = block_ps
        self._arrived = arrived
        self._left: dict[Stream, int] = {}
        """The blocks on their way, by stream."""
        self._turns: deque[Stream] = deque()
        """Streams in turn, the first of which has a block on the link."""
        self._since_ps = 0
        """The time up to which the link has been accounted for."""
        self._plans = 0

    @property
    def moving(self) -> int:
        """The number of sequences whose blocks are on the link."""
        return len(self._turns)

    def pull(self, stream: Stream) -> None:
        """Send the blocks that are ready, in addition to those on their way."""
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
        """Remove a stream that the receiver no longer waits for."""
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
        """Advance the link to now. Only streams that end at this moment can be complete."""
        if not self._turns:
            return
        blocks = (self._time.now_ps - self._since_ps) // self._block_ps
        self._since_ps += blocks * self._block_ps
        rounds, more = divmod(blocks, len(self._turns))
        for place, stream in enumerate(self._turns):
            self._left[stream] -= rounds + (place < more)
        self._turns.rotate(-more)

    def _plan(self) -> None:
        """Schedule a wake-up for when the next stream is through, unless something changes before."""
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
