"""Bytes of a sequence's KV, by what each kind of layer keeps of it. Pure.

Layers with full attention keep a block of every token, layers with a sliding window blocks of the last ones alone, and
state-space layers one state however long the sequence is. Bytes are those of one copy: ranks of a tensor-parallel group
split heads, and what each of them holds whole (MLA's latent, a head that several ranks share) counts once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose blocks come and go together."""

    block_tokens: int
    block_bytes: int
    """Of one block in all layers of the group."""
    window_tokens: int = 0
    """Tokens at the end of a sequence whose blocks are kept; 0: all tokens."""

    def blocks(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` takes. A window that does not begin with a block needs one more."""
        blocks = -(-tokens // self.block_tokens)
        return min(blocks, -(-self.window_tokens // self.block_tokens) + 1) if self.window_tokens else blocks


@dataclass(frozen=True, slots=True)
class KvShape:
    """All layers of a model."""

    groups: tuple[KvGroup, ...]
    state_bytes: int = 0
    """Of states that do not grow with the sequence."""

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` takes, in whole blocks: a hand-over moves as many."""
        return sum(group.blocks(tokens) * group.block_bytes for group in self.groups) + self.state_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes that `block_tokens` further tokens add to a long sequence. In a model that has windows alone they add
        nothing to one, so there it is what they add to a short one."""
        return round(block_tokens * (self._bytes(windows=False) or self._bytes(windows=True)))

    @property
    def token_bytes(self) -> int:
        """A token's, in layers that keep all tokens."""
        return round(self._bytes(windows=False))

    @property
    def window_token_bytes(self) -> int:
        """A token's, in layers with a window."""
        return round(self._bytes(windows=True))

    @property
    def window_tokens(self) -> int:
        """The length of the windows; where they differ, the one that gives the same bytes."""
        whole = sum(group.window_tokens * group.block_bytes / group.block_tokens for group in self.groups)
        return round(whole / self.window_token_bytes) if self.window_token_bytes else 0

    def _bytes(self, *, windows: bool) -> float:
        return sum(each.block_bytes / each.block_tokens for each in self.groups if bool(each.window_tokens) == windows)
