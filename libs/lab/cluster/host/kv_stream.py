"""KV on its way from one worker to another over the receiver's link, as blocks get ready.

A link's transfers share it evenly, as those do that take turns chunk by chunk; the sender's side is not modelled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from libs.engine.handles import Held
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
    """One worker's, which all that it receives at a time shares evenly."""

    def __init__(self, time: VirtualTime, block_ps: int, arrived: Callable[[Stream], None]) -> None:
        """`arrived` is called when all has come that was on its way for a sequence."""
        self._time = time
        self._block_ps = block_ps
        self._arrived = arrived
        self._left_ps: dict[Stream, int] = {}
        """Time on the link, had each all of it, that what is on its way still takes."""
        self._since_ps = 0
        self._plans = 0

    @property
    def moving(self) -> int:
        """Sequences whose blocks are on the link."""
        return len(self._left_ps)

    def pull(self, stream: Stream) -> None:
        """Send what is ready, beside what is on its way."""
        blocks = stream.ready
        if blocks <= 0:
            return
        self._pass()
        stream.at += blocks
        stream.moving = True
        self._left_ps[stream] = self._left_ps.get(stream, 0) + blocks * self._block_ps
        self._plan()

    def drop(self, stream: Stream) -> None:
        """Nobody waits for it any more."""
        if stream in self._left_ps:
            self._pass()
            del self._left_ps[stream]
            self._plan()

    def _pass(self) -> None:
        """Time up to now was shared; what division leaves over, less than a picosecond each, is lost."""
        now_ps, streams = self._time.now_ps, self._left_ps
        if streams:
            share_ps = (now_ps - self._since_ps) // len(streams)
            for stream in streams:
                streams[stream] -= share_ps
        self._since_ps = now_ps

    def _plan(self) -> None:
        """Wake up when the next one is through, unless something changes before."""
        self._plans += 1
        if self._left_ps:
            wait_ps = min(self._left_ps.values()) * len(self._left_ps)
            self._time.at_ps(self._time.now_ps + wait_ps, partial(self._come, self._plans))

    def _come(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._pass()
        here = [stream for stream, left_ps in self._left_ps.items() if left_ps <= 0]
        for stream in here:
            del self._left_ps[stream]
            stream.moving = False
        self._plan()
        for stream in here:
            self._arrived(stream)
