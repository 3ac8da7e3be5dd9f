"""KV handles under a lease: blocks of prefilled sequences that wait for their receiver. Pure.

Time and randomness are passed in.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

# Handles are random: nobody can pull blocks without the handle.
HANDLE_BYTES = 16

RandomBytes = Callable[[int], bytes]
"""Returns the given number of unpredictable bytes. A simulation seeds them."""


@dataclass(slots=True)
class Held:
    """The blocks behind one handle, with the state of their transfer."""

    opaque: bytes
    sequence_id: int
    blocks: list[int]
    ready: int
    """Number of leading blocks that hold all their KV."""
    expires_ns: int | None = None
    """End of the lease in Unix nanoseconds; None while the prompt is being computed."""
    pulls: int = 0
    """Number of receivers that are reading the blocks."""
    checksums: list[int | None] = field(init=False)
    """The checksum of each block, once computed. A block behind a handle does not change any more after it is
    ready.
    """

    def __post_init__(self) -> None:
        self.checksums = [None] * len(self.blocks)

    @property
    def whole(self) -> bool:
        return self.expires_ns is not None

    def unsummed(self, first: int = 0) -> int:
        """Return the first ready block from `first` on without a checksum, or `ready` if there is none."""
        return next((at for at in range(first, self.ready) if self.checksums[at] is None), self.ready)


@dataclass(slots=True)
class Received:
    """The totals of blocks received through one handle."""

    blocks: int = 0
    data_bytes: int = 0
    shared: bool = False
    """Whether they were copied from the sender's memory on this host."""


class HandleTable:
    """Handles by their opaque bytes, opened when a prompt begins and sealed under a lease when it is computed.

    A handle whose receiver left without releasing it has a shorter lease than one that waits for its first
    receiver. Leases of a kind are equally long, so they expire in the order of their last use.
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
        """Time at which the first lease ends; None without leases."""
        firsts = (next(iter(leased.values())) for leased in (self._held, self._left) if leased)
        return min((first.expires_ns for first in firsts if first.expires_ns is not None), default=None)

    def open(self, sequence_id: int, blocks: list[int]) -> Held:
        """Create a handle without a lease, for blocks that are being filled."""
        opaque = self._random_bytes(HANDLE_BYTES)
        held = self._open[opaque] = Held(opaque, sequence_id, blocks, ready=0)
        self._by_id[sequence_id] = opaque
        return held

    def seal(self, held: Held, now_ns: int) -> None:
        """Start the lease of an open handle, all of whose blocks are now ready."""
        held.ready = len(held.blocks)
        held.expires_ns = now_ns + self._lease_ns
        self._held[held.opaque] = self._open.pop(held.opaque)

    def use(self, opaque: bytes, now_ns: int) -> Held | None:
        """Return a live handle and renew its lease, which so ends a fixed time after the last block was read."""
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
        """Record that a receiver stopped reading. After the last one, a handle that was not dropped has the shorter
        lease.
        """
        held.pulls -= 1
        if not held.pulls and held.opaque in self._held:
            self._leave(held, now_ns)

    def drop(self, opaque: bytes) -> Held | None:
        """End a lease and return its handle; None if there is no such handle."""
        held = self._open.pop(opaque, None) or self._held.pop(opaque, None) or self._left.pop(opaque, None)
        if held is not None and self._by_id.get(held.sequence_id) == opaque:
            del self._by_id[held.sequence_id]
        return held

    def leave_unread(self, opaque: bytes, now_ns: int) -> None:
        """Shorten the lease of blocks that have no reader."""
        held = self._held.get(opaque)
        if held is not None and not held.pulls:
            self._leave(held, now_ns)

    def drop_sequence(self, sequence_id: int) -> Held | None:
        """End the lease of the sequence that had this id."""
        opaque = self._by_id.get(sequence_id)
        return self.drop(opaque) if opaque is not None else None

    def forget_sequence(self, sequence_id: int) -> None:
        """Detach an id that now names another sequence. The old handle lives on."""
        self._by_id.pop(sequence_id, None)

    def blocks(self) -> Iterator[int]:
        """Iterate over the blocks behind all handles, one handle after the other."""
        for held in chain(self._open.values(), self._held.values(), self._left.values()):
            yield from held.blocks

    def expire(self, now_ns: int) -> list[Held]:
        """End the leases that are over, and return their handles."""
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
        """End every lease, and return all handles."""
        held = [*self._open.values(), *self._held.values(), *self._left.values()]
        for table in (self._open, self._held, self._left):
            table.clear()
        self._by_id.clear()
        return held

    def _leave(self, held: Held, now_ns: int) -> None:
        del self._held[held.opaque]
        held.expires_ns = now_ns + self._left_lease_ns
        self._left[held.opaque] = held
