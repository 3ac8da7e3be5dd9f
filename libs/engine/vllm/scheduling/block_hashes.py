"""vLLM's KV events as our block hashes. Pure, without vLLM.

vLLM names blocks by hashes of its own; ours are chained from a root that the request brings, as its cache salt. A
block's parent is known by the event that stored it, so each hash is one step from its parent's.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from libs.contracts.hashing import block_hashes


class Rehash:
    """Holds as many hashes as the engine has reusable blocks.

    Two prompts alike that are computed at once leave two blocks of one hash: it is there until both are gone.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._ours: dict[Hashable, bytes] = {}
        self._copies: Counter[Hashable] = Counter()
        """Blocks beyond the first, of those that have several."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def stored(self, theirs: Sequence[Hashable], parent: Hashable, salt: str, token_ids: Sequence[int]) -> None:
        """Blocks in a chain from `parent`, or from the start where that is None: `salt` is the root in hex."""
        root = self._ours.get(parent) if parent is not None else _root(salt)
        if root is None:  # a chain that nobody else can have
            return
        for their, our in zip(theirs, block_hashes(root, token_ids, self._block_size_tokens), strict=False):
            if their in self._ours:
                self._copies[their] += 1
                continue
            self._ours[their] = our
            self._removed.pop(our, None)
            self._stored[our] = None

    def removed(self, theirs: Sequence[Hashable]) -> None:
        """Blocks that are reusable no more."""
        for their in theirs:
            if self._copies[their] > 0:
                self._copies[their] -= 1
                continue
            del self._copies[their]
            our = self._ours.pop(their, None)
            if our is not None and self._stored.pop(our, b"") == b"":
                self._removed[our] = None

    def cleared(self) -> None:
        """All of them are gone."""
        self._copies.clear()
        self.removed(list(self._ours))

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) since the last call."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed


def _root(salt: str) -> bytes | None:
    try:
        return bytes.fromhex(salt) or None
    except ValueError:
        return None
