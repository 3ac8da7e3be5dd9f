"""KV handles under a lease: blocks of prefilled sequences that wait for their receiver. Pure.

Time and chance are passed in.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

HANDLE_BYTES = 16
"""Handles are random: without one nobody can pull the blocks behind it."""

RandomBytes = Callable[[int], bytes]
"""Returns this many unpredictable bytes; a simulation's are seeded."""


@dataclass(slots=True)
class Held:
    """The blocks behind one handle."""

    opaque: bytes
    sequence_id: int
    blocks: list[int]
    ready: int
    """How many of them hold all their KV."""
    expires_ns: int | None = None
    """None: the prompt is still being computed."""
    pulls: int = 0
    """Receivers that are reading them."""
    checksums: list[int | None] = field(init=False)
    """The checksum of each block, once somebody has taken it. Blocks behind a handle change no more once they are
    ready."""

    def __post_init__(self) -> None:
        self.checksums = [None] * len(self.blocks)

    @property
    def whole(self) -> bool:
        """Whether the prompt is computed."""
        return self.expires_ns is not None

    def unsummed(self, first: int = 0) -> int:
        """The first block from `first` on whose checksum is not known; `ready` where all are that can be."""
        return next((at for at in range(first, self.ready) if self.checksums[at] is None), self.ready)


@dataclass(slots=True)
class Received:
    """What came of a handle's blocks."""

    blocks: int = 0
    data_bytes: int = 0
    shared: bool = False
    """From the sender's memory, on this host."""


class HandleTable:
    """Handles by their opaque bytes, opened when a prompt begins and sealed under a lease when it is computed.

    A handle whose receiver left without a word has a shorter lease than one that waits for its first. The leases of a
    kind are equally long, so they expire in the order of their last use.
    """

    def __init__(self, *, random_bytes: RandomBytes, lease_ns: int, left_lease_ns: int) -> None:
        self._random_bytes = random_bytes
        self._lease_ns = lease_ns
        self._left_lease_ns = min(left_lease_ns, lease_ns)
        self._open: dict[bytes, Held] = {}
        self._held: OrderedDict[bytes, Held] = OrderedDict()
        self._left: OrderedDict[bytes, Held] = OrderedDict()
        self._by_id: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._held) + len(self._left)

    @property
    def next_expiry_ns(self) -> int | None:
        """When the first lease ends; None without any."""
        firsts = (next(iter(leased.values())) for leased in (self._held, self._left) if leased)
        return min((first.expires_ns for first in firsts if first.expires_ns is not None), default=None)

    def open(self, sequence_id: int, blocks: list[int]) -> Held:
        """A new handle without a lease, for blocks that are being filled."""
        opaque = self._random_bytes(HANDLE_BYTES)
        held = self._open[opaque] = Held(opaque, sequence_id, blocks, ready=0)
        self._by_id[sequence_id] = opaque
        return held

    def seal(self, held: Held, now_ns: int) -> None:
        """All blocks of an open handle are there: its lease begins."""
        held.ready = len(held.blocks)
        held.expires_ns = now_ns + self._lease_ns
        self._held[held.opaque] = self._open.pop(held.opaque)

    def use(self, opaque: bytes, now_ns: int) -> Held | None:
        """A live handle, its lease renewed: it ends so long after the last block was read."""
        held = self._open.get(opaque)
        if held is not None:
            return held
        held = self._held.get(opaque) or self._left.get(opaque)
        if held is None or held.expires_ns is None or held.expires_ns <= now_ns:
            return None
        held.expires_ns = now_ns + self._lease_ns
        self._left.pop(opaque, None)
        self._held[opaque] = held
        self._held.move_to_end(opaque)
        return held

    def leave(self, held: Held, now_ns: int) -> None:
        """A receiver reads it no more; unless it was dropped, the last one to go leaves it the shorter lease."""
        held.pulls -= 1
        if not held.pulls and held.opaque in self._held:
            self._leave(held, now_ns)

    def drop(self, opaque: bytes) -> Held | None:
        """End a lease; None when there is none."""
        held = self._open.pop(opaque, None) or self._held.pop(opaque, None) or self._left.pop(opaque, None)
        if held is not None and self._by_id.get(held.sequence_id) == opaque:
            del self._by_id[held.sequence_id]
        return held

    def leave_unread(self, opaque: bytes, now_ns: int) -> None:
        """Blocks that nobody reads have the shorter lease from now on."""
        held = self._held.get(opaque)
        if held is not None and not held.pulls:
            self._leave(held, now_ns)

    def drop_sequence(self, sequence_id: int) -> Held | None:
        """End the lease of the sequence that had this id."""
        opaque = self._by_id.get(sequence_id)
        return self.drop(opaque) if opaque is not None else None

    def forget_sequence(self, sequence_id: int) -> None:
        """The id means another sequence from now on; its old handle lives on."""
        self._by_id.pop(sequence_id, None)

    def blocks(self) -> Iterator[int]:
        """The blocks behind all handles, one handle after the other."""
        for held in chain(self._open.values(), self._held.values(), self._left.values()):
            yield from held.blocks

    def expire(self, now_ns: int) -> list[Held]:
        """End the leases that are over."""
        over: list[Held] = []
        for leased in (self._held, self._left):
            while leased:
                first = next(iter(leased.values()))
                if first.expires_ns is None or first.expires_ns > now_ns:
                    break
                self.drop(first.opaque)
                over.append(first)
        return over

    def drop_all(self) -> list[Held]:
        """End every lease."""
        held = [*self._open.values(), *self._held.values(), *self._left.values()]
        for table in (self._open, self._held, self._left):
            table.clear()
        self._by_id.clear()
        return held

    def _leave(self, held: Held, now_ns: int) -> None:
        del self._held[held.opaque]
        held.expires_ns = now_ns + self._left_lease_ns
        self._left[held.opaque] = held
