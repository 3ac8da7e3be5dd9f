"""Translation of vLLM's KV events into our block hashes. Pure, without vLLM.

vLLM identifies blocks by hashes of its own. Ours are chained from a root that the request carries as its cache
salt. The event that stores a block names its parent, so each hash follows from the parent's.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from libs.contracts.hashing import block_hashes


class Rehash:
    """A map from vLLM's hashes to ours, as large as the set of reusable blocks in the engine.

    If two equal prompts are computed at once, two blocks have the same hash. It counts as stored until both are
    gone.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._ours: dict[Hashable, bytes] = {}
        self._copies: Counter[Hashable] = Counter()
        """Number of blocks beyond the first, for hashes that several blocks have."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def stored(self, theirs: Sequence[Hashable], parent: Hashable, salt: str, token_ids: Sequence[int]) -> None:
        """Record a chain of stored blocks that follows `parent`, or starts a chain if that is None. `salt` is the root
        in hex.
        """
        root = self._ours.get(parent) if parent is not None else _root(salt)
        if root is None:  # a chain that no other sequence can share
            return
        for their, our in zip(theirs, block_hashes(root, token_ids, self._block_size_tokens), strict=False):
            if their in self._ours:
                self._copies[their] += 1
                continue
            self._ours[their] = our
            self._removed.pop(our, None)
            self._stored[our] = None

    def removed(self, theirs: Sequence[Hashable]) -> None:
        """Record that blocks are no longer reusable."""
        for their in theirs:
            if self._copies[their] > 0:
                self._copies[their] -= 1
                continue
            del self._copies[their]
            our = self._ours.pop(their, None)
            if our is not None and self._stored.pop(our, b"") == b"":
                self._removed[our] = None

    def cleared(self) -> None:
        self._copies.clear()
        self.removed(list(self._ours))

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes (stored, removed) since the last call."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed


def _root(salt: str) -> bytes | None:
    try:
        return bytes.fromhex(salt) or None
    except ValueError:
        return None
