"""Bytes of a sequence's KV by kind of layer. Pure.

Layers with full attention keep blocks of every token, layers with a sliding window keep blocks of the last ones
only. State-space layers keep one state for a sequence of any length. Bytes are those of one copy. Ranks of a
tensor-parallel group split heads, and whatever each rank holds whole (MLA's latent, a head that several ranks
share) counts once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers whose blocks are allocated and freed together."""

    block_tokens: int
    block_bytes: int
    """Bytes of one block in all layers of the group."""
    window_tokens: int = 0
    """Tokens at the end of a sequence whose blocks are kept; 0 for all tokens."""

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a sequence of `tokens` tokens. A window that starts within a block needs one more."""
        blocks = -(-tokens // self.block_tokens)
        return min(blocks, -(-self.window_tokens // self.block_tokens) + 1) if self.window_tokens else blocks


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of all layers of a model."""

    groups: tuple[KvGroup, ...]
    state_bytes: int = 0
    """Bytes of states, which do not grow with the sequence."""

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` tokens in whole blocks, which a hand-over moves."""
        return sum(group.blocks(tokens) * group.block_bytes for group in self.groups) + self.state_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes that `block_tokens` more tokens add to a long sequence.

        In a model with windows only they would add nothing, so there they are added to a short sequence.
        """
        return round(block_tokens * (self._bytes(windows=False) or self._bytes(windows=True)))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in layers that keep all tokens."""
        return round(self._bytes(windows=False))

    @property
    def window_token_bytes(self) -> int:
        """Bytes of a token in layers with a window."""
        return round(self._bytes(windows=True))

    @property
    def window_tokens(self) -> int:
        """Length of the windows. If they differ, the single length that needs the same bytes."""
        whole = sum(group.window_tokens * group.block_bytes / group.block_tokens for group in self.groups)
        return round(whole / self.window_token_bytes) if self.window_token_bytes else 0

    def _bytes(self, *, windows: bool) -> float:
        return sum(each.block_bytes / each.block_tokens for each in self.groups if bool(each.window_tokens) == windows)
