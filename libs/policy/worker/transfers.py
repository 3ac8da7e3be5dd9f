"""The speed at which KV reaches a worker, learned from completed transfers."""

from typing import Final

NOTICEABLE: Final = 0.05
"""The smallest relative change of a link's speed that is worth reporting."""
# The fastest transfer seen sets the link's speed; each slower one moves it by at most this factor.
LINK_FORGETS: Final = 1.02
# Shorter transfers measure latency rather than speed.
MIN_TRANSFER_BLOCKS: Final = 4


class TransferSpeed:
    """The speed of a worker's KV link, estimated from its fastest transfers.

    A transfer that waited for its prompt says less about the link than one that did not.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self.token_ns = 0.0
        """Time to receive the KV of one token; 0 if unknown."""

    def arrived(self, blocks: int, duration_ns: int) -> None:
        """Record a transfer of blocks and its duration."""
        if blocks < MIN_TRANSFER_BLOCKS or duration_ns <= 0:
            return
        token_ns = duration_ns / (blocks * self._block_size_tokens)
        self.token_ns = min(token_ns, self.token_ns * LINK_FORGETS) if self.token_ns else token_ns

    def differs(self, reported_ns: float) -> bool:
        return abs(self.token_ns - reported_ns) > NOTICEABLE * reported_ns
