"""KV on its way from one worker to another over the receiver's link: one transfer after the other, as blocks get ready.

The receiver's link is the one that all its transfers share, as in the sim engine; the sender's side is not modelled.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    """One worker's."""

    def __init__(self, time: VirtualTime, block_ps: int, arrived: Callable[[Stream], None]) -> None:
        """`arrived` is called with each part that has come."""
        self._time = time
        self._block_ps = block_ps
        self._arrived = arrived
        self._free_ps = 0
        self.moving = 0
        """Parts on the link."""
        self.blocks = 0
        """Received so far."""

    def pull(self, stream: Stream) -> None:
        """Send what is ready, unless a part of it is on its way."""
        if stream.moving or stream.ready <= 0:
            return
        blocks, stream.moving = stream.ready, True
        stream.at += blocks
        self.moving += 1
        self._free_ps = max(self._free_ps, self._time.now_ps) + blocks * self._block_ps

        def come() -> None:
            stream.moving = False
            self.moving -= 1
            self.blocks += blocks
            self._arrived(stream)

        self._time.at_ps(self._free_ps, come)
