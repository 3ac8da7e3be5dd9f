"""KV that leaves a worker: its transfer speed, and the engines that can read it."""

from dataclasses import dataclass
from typing import Final

NOTICEABLE: Final = 0.05
"""The smallest relative change of a link's speed that is worth reporting."""
# The fastest transfer seen sets the link's speed; each slower one moves it by at most this factor.
LINK_FORGETS: Final = 1.02
# The first transfers after a start meet cold caches and busy cores, and may all have waited for their prompts.
LEAST_TRANSFERS: Final = 8
# Shorter transfers measure latency rather than speed.
MIN_TRANSFER_BLOCKS: Final = 4


class TransferSpeed:
    """The speed of a worker's KV link, estimated from its fastest transfers.

    A transfer that waited for its prompt says less about the link than others.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self.token_ns = 0.0
        """The time to receive the KV of one token; 0 if unknown."""
        self._conclusive = 0

    @property
    def settled_token_ns(self) -> float:
        """`token_ns` after enough transfers to judge the link by it; else 0."""
        return self.token_ns if self._conclusive >= LEAST_TRANSFERS else 0.0

    def arrived(self, blocks: int, duration_ns: int) -> None:
        if blocks < MIN_TRANSFER_BLOCKS or duration_ns <= 0:
            return
        self._conclusive += 1
        token_ns = duration_ns / (blocks * self._block_size_tokens)
        self.token_ns = min(token_ns, self.token_ns * LINK_FORGETS) if self.token_ns else token_ns

    def differs(self, reported_ns: float) -> bool:
        return abs(self.token_ns - reported_ns) > NOTICEABLE * reported_ns


# vLLM 0.32 reads over NIXL between tensor-parallel widths of which one divides the other. A rank of the wider side has
# a part of the heads, or all of a latent (MLA). Reading a part requires blocks that keep one head's tokens together,
# and heads that are held once: vLLM reads heads held by several ranks only towards wider engines, and workers here
# change sides. So widths fall into named classes whose members can all read each other.
HEADS_APART = "HNC"
"""The suffix of vLLM's layout names for blocks that store one head's tokens before the next head's."""


@dataclass(frozen=True, slots=True)
class KvSplit:
    """The division of an engine's KV between its ranks."""

    width: int
    """The number of ranks in the tensor-parallel group."""
    kv_heads: int
    """The number of KV heads of the whole model; ignored for a latent."""
    is_latent: bool = False
    """True if the model uses MLA, where each rank holds the whole latent."""
    has_states: bool = False
    """True if the model has state-space layers, whose states move whole."""
    order: str = ""
    """The order of a block's dimensions in memory, by vLLM's name; empty if unknown."""
    context_width: int = 1
    """The number of ranks that divide the tokens of a sequence between them."""
    over_nixl: bool = True
    """True if only NIXL's connector moves the blocks."""


def width_class(split: KvSplit) -> str:
    """Return the name of the class of engines that can read each other's KV; the name of a class of one states the
    reason.
    """
    apart = _apart(split)
    return f"tp{split.width} ({apart})" if apart else "tp2^n"


def _apart(split: KvSplit) -> str:
    """Return why an engine exchanges KV only with engines of its own width; empty if it is not so restricted."""
    if not split.over_nixl:
        return "only NIXL reads other widths"
    if split.width & (split.width - 1):
        return "no power of two"
    if split.context_width > 1:
        return f"{split.context_width} ranks share a context"
    if split.has_states:
        return "state-space layers"
    if split.is_latent:
        return ""
    if split.width > split.kv_heads:
        return f"more ranks than its {split.kv_heads} KV heads"
    if split.kv_heads % split.width:
        return f"{split.kv_heads} KV heads do not divide"
    if not split.order:
        return "unknown order of KV in memory"
    return "" if split.order.endswith(HEADS_APART) else f"heads are not apart in {split.order}"
