"""How fast KV comes to a worker, learned from the transfers that did. Pure."""

from typing import Final

NOTICEABLE: Final = 0.05
"""A link that changes by a smaller share is not worth telling anyone."""
LINK_FORGETS: Final = 1.02
"""The fastest transfer seen sets the link's speed; each slower one moves it by at most this factor."""
MIN_TRANSFER_BLOCKS: Final = 4
"""Shorter transfers tell more of latency than of speed."""


class TransferSpeed:
    """A transfer that waited for its prompt says less of the link than one that did not: the fast ones count."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self.token_ns = 0.0
        """To receive the KV of one token; 0: not known."""

    def arrived(self, blocks: int, duration_ns: int) -> None:
        """Note blocks that came, and the time they took."""
        if blocks < MIN_TRANSFER_BLOCKS or duration_ns <= 0:
            return
        token_ns = duration_ns / (blocks * self._block_size_tokens)
        self.token_ns = min(token_ns, self.token_ns * LINK_FORGETS) if self.token_ns else token_ns

    def differs(self, reported_ns: float) -> bool:
        """Whether the speed differs noticeably from the one last reported."""
        return abs(self.token_ns - reported_ns) > NOTICEABLE * reported_ns
