"""The block pool: preallocated KV blocks by id, counted references, reuse by chained hash, LRU eviction. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Block:
    """One block. Free, or referenced, or unreferenced but kept for its hash."""

    references: int = 0
    content: bytes | None = None
    """Chained hash of the tokens whose KV is in the block; None: nobody may reuse it."""


@dataclass(slots=True)
class BlockChanges:
    """Net changes of what can be reused: a hash that was stored and removed again since the last look is in neither."""

    stored: dict[bytes, None] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)

    def store(self, content: bytes) -> None:
        """A hash became reusable."""
        if content in self.removed:
            del self.removed[content]
        else:
            self.stored[content] = None

    def remove(self, content: bytes) -> None:
        """A hash was evicted."""
        if content in self.stored:
            del self.stored[content]
        else:
            self.removed[content] = None


class BlockPool:
    """Block ids 0..blocks-1. Every allocated block is released as often as it was allocated or shared."""

    def __init__(self, blocks: int) -> None:
        self._blocks = [_Block() for _ in range(blocks)]
        self._free = list(range(blocks - 1, -1, -1))
        self._by_content: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Unreferenced blocks with a hash, least recently used first."""
        self.changes = BlockChanges()

    @property
    def size(self) -> int:
        """All blocks."""
        return len(self._blocks)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out: free ones, and those that can be evicted."""
        return len(self._free) + len(self._evictable)

    @property
    def referenced(self) -> int:
        """Blocks in use."""
        return self.size - self.available

    def references(self, block: int) -> int:
        """How many sequences and handles hold a block."""
        return self._blocks[block].references

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a hash chain; they are not held until they are shared."""
        found: list[int] = []
        for content in hashes:
            block = self._by_content.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int, shared: Sequence[int] = (), *, spare: int = 0) -> list[int] | None:
        """`shared` blocks (from `match`) and `count` new ones, all referenced, so that `spare` stay available.

        None, changing nothing, without room.
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
        """Give back one reference to each block of a sequence, first to last; raises ValueError on a double release."""
        # Last first: the end of a chain is evicted before its start, without which it could not be found.
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
        """A held block is full and computed: it can be shared from now on, unless another has the same content."""
        if content in self._by_content:
            return
        self._blocks[block].content = content
        self._by_content[content] = block
        self.changes.store(content)

    def fault(self, held: Iterable[int]) -> str:
        """How the books differ from the blocks that are held, each named as often as it is; empty when they agree."""
        counts = Counter(held)
        if self.referenced != len(counts):
            return f"{self.referenced} KV blocks count as held, {len(counts)} are"
        for block, count in counts.items():
            if self.references(block) != count:
                return f"KV block {block} has {self.references(block)} references, {count} hold it"
        return ""

    def take_changes(self) -> BlockChanges:
        """Changes since the last call."""
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
