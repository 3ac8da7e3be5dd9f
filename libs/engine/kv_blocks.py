"""The pool of KV blocks with its reference counts, handles under a lease, and the time lost to waiting for KV. Pure.

The caller passes in time and randomness.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain


@dataclass(slots=True)
class _Block:
    """A block that is free, referenced, or unreferenced with content that can be reused."""

    references: int = 0
    content: bytes | None = None
    """The chained hash of the tokens whose KV is in the block; None if the block cannot be reused."""


@dataclass(slots=True)
class BlockChanges:
    """The net changes of reusable hashes between two calls of `take_changes`.

    A hash that was stored and removed in between appears in neither set.
    """

    stored: dict[bytes, None] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)

    def store(self, content: bytes) -> None:
        """Record that a hash became reusable. It cancels a removal since the last call of `take_changes`."""
        if content in self.removed:
            del self.removed[content]
        else:
            self.stored[content] = None

    def remove(self, content: bytes) -> None:
        """Record that a hash was evicted. It cancels a store since the last call of `take_changes`."""
        if content in self.stored:
            del self.stored[content]
        else:
            self.removed[content] = None


class BlockPool:
    """A pool of blocks 0..blocks-1. Each block is released as often as it was allocated or shared."""

    def __init__(self, blocks: int) -> None:
        self._blocks = [_Block() for _ in range(blocks)]
        self._free = list(range(blocks - 1, -1, -1))
        self._by_content: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """The unreferenced blocks with a hash, least recently used first."""
        self.changes = BlockChanges()

    @property
    def size(self) -> int:
        return len(self._blocks)

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can give out: free ones and those that can be evicted."""
        return len(self._free) + len(self._evictable)

    @property
    def referenced(self) -> int:
        return self.size - self.available

    def references(self, block: int) -> int:
        """Return the number of sequences and handles that reference a block."""
        return self._blocks[block].references

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a hash chain.

        The blocks can be evicted until `allocate` references them.
        """
        found: list[int] = []
        for content in hashes:
            block = self._by_content.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int, shared: Sequence[int] = (), *, spare: int = 0) -> list[int] | None:
        """Reference `shared` blocks (from `match`) and `count` new ones, and return both.

        Return None and change nothing if fewer than `spare` blocks would remain available.
        """
        idle = sum([not self._blocks[block].references for block in shared]) if shared else 0
        if count + spare > self.available - idle:
            return None
        for block in shared:
            self._evictable.pop(block, None)
            self._blocks[block].references += 1
        taken = [self._take() for _ in range(count)]
        return [*shared, *taken] if shared else taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, first to last. Raise ValueError on a double release."""
        # The end of a chain is evicted before its start, because no sequence could find the end without the start.
        for block in reversed(blocks):
            entry = self._blocks[block]
            if entry.references < 1:
                raise ValueError(f"block {block} is not held by anyone")
            entry.references -= 1
            if entry.references:
                continue
            if entry.content is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def register(self, block: int, content: bytes) -> None:
        """Make a referenced, full and computed block reusable, unless another block has the same content."""
        if content in self._by_content:
            return
        self._blocks[block].content = content
        self._by_content[content] = block
        self.changes.store(content)

    def fault(self, held: Iterable[int]) -> str:
        """Describe the first mismatch of the reference counts with `held`; empty if there is none.

        `held` names a block once for each of its references.
        """
        counts = Counter(held)
        if self.referenced != len(counts):
            return f"{self.referenced} KV blocks count as held, {len(counts)} are"
        for block, count in counts.items():
            if self.references(block) != count:
                return f"KV block {block} has {self.references(block)} references, {count} hold it"
        return ""

    def take_changes(self) -> BlockChanges:
        """Return the changes since the last call."""
        changes, self.changes = self.changes, BlockChanges()
        return changes

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            content = self._blocks[block].content
            assert content is not None
            self._blocks[block].content = None
            del self._by_content[content]
            self.changes.remove(content)
        self._blocks[block].references = 1
        return block


# Handles are random, so that no process can guess one and pull the blocks.
HANDLE_BYTES = 16

RandomBytes = Callable[[int], bytes]
"""A function that returns the given number of unpredictable bytes. The simulator's are seeded."""


@dataclass(slots=True)
class Offer:
    """The blocks that other workers can pull by a handle, with the state of their transfer."""

    opaque: bytes
    sequence_id: int
    blocks: list[int]
    ready: int
    """The number of leading blocks whose KV is complete."""
    expires_ns: int | None = None
    """The end of the lease in Unix nanoseconds; None while the prompt is being computed."""
    pulls: int = 0
    """The number of receivers that are reading the blocks."""
    token_ids: tuple[int, ...] = ()
    """The tokens sampled after a prompt, for the receiver of a named handle."""
    checksums: list[int | None] = field(init=False)
    """The checksum of each block; None until it is computed. The content of a ready block behind a handle never
    changes.
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
class ReceivedTotals:
    """The totals of the blocks received through one handle."""

    blocks: int = 0
    data_bytes: int = 0
    shared: bool = False
    """True if the blocks were copied from the sender's memory on this host."""
    token_ids: tuple[int, ...] = ()
    """The tokens sampled by the sender; empty if it sent none."""
    first_waited_ns: int = 0
    """The time for which the sender of a named handle had not yet a first block to send; 0 if unknown."""
    waited_ns: int = 0
    """The total time for which the sender of a named handle had no block to send, including `first_waited_ns`."""


class HandleTable:
    """The offers by handle.

    A handle is opened when its prompt begins, and sealed under a lease when its prompt is computed. Once its last
    receiver has left without releasing it, a shorter lease applies. Leases of a kind have equal lengths, so they expire
    in the order of their last use.
    """

    def __init__(self, *, random_bytes: RandomBytes, lease_ns: int, left_lease_ns: int) -> None:
        self._random_bytes = random_bytes
        self._lease_ns = lease_ns
        self._left_lease_ns = min(left_lease_ns, lease_ns)
        self._open: dict[bytes, Offer] = {}
        self._sealed: OrderedDict[bytes, Offer] = OrderedDict()
        self._left: OrderedDict[bytes, Offer] = OrderedDict()
        self._by_id: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._sealed) + len(self._left)

    @property
    def next_expiry_ns(self) -> int | None:
        """The time at which the first lease ends; None without leases."""
        firsts = (next(iter(leased.values())) for leased in (self._sealed, self._left) if leased)
        return min((first.expires_ns for first in firsts if first.expires_ns is not None), default=None)

    def __contains__(self, opaque: bytes) -> bool:
        return opaque in self._open or opaque in self._sealed or opaque in self._left

    def open(self, sequence_id: int, blocks: list[int], name: bytes = b"") -> Offer:
        """Create a handle without a lease for blocks that are being filled.

        `name` must be unused; if empty, a random one is made.
        """
        opaque = name or self._random_bytes(HANDLE_BYTES)
        offer = self._open[opaque] = Offer(opaque, sequence_id, blocks, ready=0)
        self._by_id[sequence_id] = opaque
        return offer

    def seal(self, offer: Offer, now_ns: int) -> None:
        """Start the lease of an open handle, whose blocks are now all ready."""
        offer.ready = len(offer.blocks)
        offer.expires_ns = now_ns + self._lease_ns
        self._sealed[offer.opaque] = self._open.pop(offer.opaque)

    def use(self, opaque: bytes, now_ns: int) -> Offer | None:
        """Return the offer behind a live handle and renew its lease; None if there is none."""
        offer = self._open.get(opaque)
        if offer is not None:
            return offer
        offer = self._sealed.get(opaque) or self._left.get(opaque)
        if offer is None or offer.expires_ns is None or offer.expires_ns <= now_ns:
            return None
        offer.expires_ns = now_ns + self._lease_ns
        self._left.pop(opaque, None)
        self._sealed[opaque] = offer
        self._sealed.move_to_end(opaque)
        return offer

    def leave(self, offer: Offer, now_ns: int) -> None:
        """Record that a receiver stopped reading. After the last one, the handle gets the shorter lease."""
        offer.pulls -= 1
        if not offer.pulls and offer.opaque in self._sealed:
            self._leave(offer, now_ns)

    def drop(self, opaque: bytes) -> Offer | None:
        """End a lease and return its offer; None if the handle is unknown."""
        offer = self._open.pop(opaque, None) or self._sealed.pop(opaque, None) or self._left.pop(opaque, None)
        if offer is not None and self._by_id.get(offer.sequence_id) == opaque:
            del self._by_id[offer.sequence_id]
        return offer

    def leave_unread(self, opaque: bytes, now_ns: int) -> None:
        """Apply the shorter lease to a handle that has no reader."""
        offer = self._sealed.get(opaque)
        if offer is not None and not offer.pulls:
            self._leave(offer, now_ns)

    def drop_sequence(self, sequence_id: int) -> Offer | None:
        """End the lease of the sequence's handle and return its offer; None if it has none."""
        opaque = self._by_id.get(sequence_id)
        return self.drop(opaque) if opaque is not None else None

    def forget_sequence(self, sequence_id: int) -> None:
        """Detach the handle of an earlier sequence from its id, which a new sequence takes. The handle stays valid."""
        self._by_id.pop(sequence_id, None)

    def blocks(self) -> Iterator[int]:
        """Iterate over the blocks of all offers, one offer after the other."""
        for offer in chain(self._open.values(), self._sealed.values(), self._left.values()):
            yield from offer.blocks

    def expire(self, now_ns: int) -> list[Offer]:
        """End the expired leases, and return their offers."""
        over: list[Offer] = []
        for leased in (self._sealed, self._left):
            while leased:
                first = next(iter(leased.values()))
                if first.expires_ns is None or first.expires_ns > now_ns:
                    break
                self.drop(first.opaque)
                over.append(first)
        return over

    def drop_all(self) -> list[Offer]:
        """End every lease, and return all offers."""
        offers = [*self._open.values(), *self._sealed.values(), *self._left.values()]
        for table in (self._open, self._sealed, self._left):
            table.clear()
        self._by_id.clear()
        return offers

    def _leave(self, offer: Offer, now_ns: int) -> None:
        del self._sealed[offer.opaque]
        offer.expires_ns = now_ns + self._left_lease_ns
        self._left[offer.opaque] = offer


class _Spans:
    """The intervals, in Unix nanoseconds, in which a condition was true."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []
        self.since_ns = 0

    def now(self, holds: bool, now_ns: int) -> None:
        if holds and not self.since_ns:
            self.since_ns = now_ns
        elif not holds and self.since_ns:
            if now_ns > self.since_ns:
                self.ended.append((self.since_ns, now_ns))
            self.since_ns = 0

    def take_ended(self) -> tuple[tuple[int, int], ...]:
        ended, self.ended = tuple(self.ended), []
        return ended


class KvWait:
    """A clock that measures KV wait and starvation: the time between steps in which a sequence lacks its KV.

    The time is KV wait if some of the KV is ready at its source but not here. It is starvation if all of the KV is
    still to be computed. All times are exact nanoseconds.
    """

    def __init__(self) -> None:
        self._awaiting = False
        self._ready = False
        self._stepping = False
        self._waits = _Spans()
        self._starved = _Spans()

    @property
    def ended(self) -> list[tuple[int, int]]:
        """The non-empty intervals (start, end) of KV wait that ended since `take_ended`."""
        return self._waits.ended

    @property
    def since_ns(self) -> int:
        """The start of the current KV wait; 0 if there is none."""
        return self._waits.since_ns

    @property
    def starved_ended(self) -> list[tuple[int, int]]:
        """The intervals of starvation that ended since `take_starved`."""
        return self._starved.ended

    @property
    def starved_since_ns(self) -> int:
        """The start of the current starvation; 0 if there is none."""
        return self._starved.since_ns

    def awaiting(self, some: bool, now_ns: int, *, ready: bool = True) -> None:
        """Record whether any sequence lacks its KV from now on, and whether some of that KV is ready at its source."""
        self._awaiting, self._ready = some, ready
        self._settle(now_ns)

    def stepping(self, running: bool, now_ns: int) -> None:
        """Record whether a step runs from now on."""
        self._stepping = running
        self._settle(now_ns)

    def take_ended(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of KV wait that ended since the last call."""
        return self._waits.take_ended()

    def take_starved(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of starvation that ended since the last call."""
        return self._starved.take_ended()

    def _settle(self, now_ns: int) -> None:
        rests = self._awaiting and not self._stepping
        self._waits.now(rests and self._ready, now_ns)
        self._starved.now(rests and not self._ready, now_ns)
