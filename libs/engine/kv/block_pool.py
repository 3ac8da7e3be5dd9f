"""The block pool: preallocated KV blocks with reference counts, reuse by chained hash and LRU eviction. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Block:
    """A block that is free, referenced, or unreferenced but kept for its hash."""

    references: int = 0
    content: bytes | None = None
    """Chained hash of the tokens whose KV is in the block; None if it cannot be reused."""


@dataclass(slots=True)
class BlockChanges:
    """Net changes of the reusable hashes. A hash stored and removed between two calls appears in neither."""

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
        """Unreferenced blocks with a hash, least recently used first."""
        self.changes = BlockChanges()

    @property
    def size(self) -> int:
        return len(self._blocks)

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can give out: free ones and those that can be evicted."""
        return len(self._free) + len(self._evictable)

    @property
    def referenced(self) -> int:
        return self.size - self.available

    def references(self, block: int) -> int:
        """Return how many sequences and handles hold a block."""
        return self._blocks[block].references

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a hash chain. They are not held until they are shared."""
        found: list[int] = []
        for content in hashes:
            block = self._by_content.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int, shared: Sequence[int] = (), *, spare: int = 0) -> list[int] | None:
        """Reference `shared` blocks (from `match`) and `count` new ones, and return both.

        Return None and change nothing if fewer than `spare` blocks would stay available.
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
        """Drop one reference to each block of a sequence, given first to last. Raise ValueError on a double
        release.
        """
        # Last first, so that the end of a chain is evicted before its start, without which it could not be found.
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
        """Make a held, full and computed block reusable, unless another block has the same content."""
        if content in self._by_content:
            return
        self._blocks[block].content = content
        self._by_content[content] = block
        self.changes.store(content)

    def fault(self, held: Iterable[int]) -> str:
        """Compare the reference counts with `held`, which names a block once for each holder. Return the difference,
        if any.
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
