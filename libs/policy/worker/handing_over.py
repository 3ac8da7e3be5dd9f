"""KV that leaves a worker: whether a sequence goes with it, at which speed it travels, and who can read it."""

from dataclasses import dataclass
from typing import Final

REMEMBERED = 0.95
"""The factor by which each new hand-over scales the weight of earlier ones."""
WEIGHT = 0.2
"""Weight of the newest observation in a running mean."""
PRIOR_WEIGHT = 0.25
MAX_WAIT_S: Final = 5.0
"""The longest that a worker that left decode waits for a sequence that could be computed again elsewhere."""
PRIOR = ((0.0, 0.005), (1e9, 1.0))
"""Assumed (bytes, seconds): binding takes two turns of a stream and a step; the link carries 1 GB/s."""


class HandOverTime:
    """The duration of a hand-over as a linear function of its bytes.

    The line is fitted to observations on top of a prior. Its intercept is the time to bind, its slope the link.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, kv_bytes: int, seconds: float) -> None:
        """Record the time from sealing the blocks to their arrival."""
        self._sums = _add(_scaled(self._sums, REMEMBERED), kv_bytes, seconds)

    def seconds(self, kv_bytes: int) -> float:
        """Return the expected time to hand over `kv_bytes`; never negative, and never less for more bytes."""
        sums = self._sums
        for prior_bytes, prior_s in PRIOR:
            sums = _add(sums, prior_bytes, prior_s, PRIOR_WEIGHT)
        count, x, y, xx, xy = sums
        slope = (count * xy - x * y) / (count * xx - x * x)
        if slope < 0:
            return y / count
        binding_s = (y - slope * x) / count
        if binding_s < 0:  # refit the line through the origin instead of clipping it at 0
            return xy / xx * kv_bytes
        return binding_s + slope * kv_bytes


@dataclass(frozen=True, slots=True)
class Staying:
    """Running means that predict when a sequence ends on its present worker."""

    tpot_s: float = 0.0
    """Duration of a decode step there; 0 before the first one."""
    mean_output_tokens: float = 0.0
    """Mean output length of answers that ended there; 0 before the first one."""

    def stepped(self, step_s: float) -> "Staying":
        """Return the state after one more decode step."""
        return Staying(_mean(self.tpot_s, step_s), self.mean_output_tokens)

    def ended(self, output_tokens: int) -> "Staying":
        """Return the state after one more answer that ended by itself."""
        return Staying(self.tpot_s, _mean(self.mean_output_tokens, output_tokens))

    def seconds(self, most_tokens_left: int) -> float:
        """Return the expected time until a sequence with at most this many tokens left ends.

        It is infinite before the first step.
        """
        tokens = expected_tokens_left(most_tokens_left, self.mean_output_tokens)
        return tokens * self.tpot_s if self.tpot_s else float("inf")


def expected_tokens_left(most: int, mean_output_tokens: float) -> float:
    """Return the expected number of output tokens to come, at most `most`.

    The tokens so far do not lower it: lengths are taken to be memoryless, so a full mean always remains.
    """
    return min(most, mean_output_tokens) if mean_output_tokens else most


def sooner_handed_over(most_tokens_left: int, kv_bytes: int, staying: Staying, time: HandOverTime) -> bool:
    """Return whether a hand-over frees the worker of a sequence before the sequence's end would."""
    return time.seconds(kv_bytes) < staying.seconds(most_tokens_left)


def sooner_recomputed(most_tokens_left: int, recompute_s: float, waited_s: float, staying: Staying) -> bool:
    """Return whether to compute a sequence again elsewhere, in `recompute_s`, because its KV cannot move.

    A sequence that is expected to take longer than that goes at once. One that lasts longer than expected is given
    `recompute_s`, at most MAX_WAIT_S, so nobody waits more than twice as long as necessary. One that is sure to end
    before that stays.
    """
    longest_s = most_tokens_left * staying.tpot_s
    if staying.tpot_s and longest_s <= min(recompute_s, MAX_WAIT_S):
        return False
    return staying.seconds(most_tokens_left) > recompute_s or waited_s >= min(recompute_s, MAX_WAIT_S)


_Sums = tuple[float, float, float, float, float]
"""Weighted sums of (1, x, y, x², x·y)."""


def _add(sums: _Sums, x: float, y: float, weight: float = 1.0) -> _Sums:
    count, of_x, of_y, of_xx, of_xy = sums
    return (
        count + weight,
        of_x + weight * x,
        of_y + weight * y,
        of_xx + weight * x * x,
        of_xy + weight * x * y,
    )


def _scaled(sums: _Sums, factor: float) -> _Sums:
    count, of_x, of_y, of_xx, of_xy = sums
    return count * factor, of_x * factor, of_y * factor, of_xx * factor, of_xy * factor


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value


NOTICEABLE: Final = 0.05
"""The smallest relative change of a link's speed that is worth reporting."""
# The fastest transfer seen sets the link's speed; each slower one moves it by at most this factor.
LINK_FORGETS: Final = 1.02
# The first transfers after a start meet cold caches and busy cores, and all may have waited for their prompts.
LEAST_TRANSFERS: Final = 8
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
# a part of the heads, or all of a latent (MLA). Reading a part needs blocks that hold one head's tokens together, and
# heads that are held once: vLLM reads heads held by several ranks only towards wider engines, and workers here change
# sides. So widths fall into named classes whose members can all read each other.
HEADS_APART = "HNC"
"""The suffix of vLLM's layout names for blocks that store one head's tokens before the next head's."""


@dataclass(frozen=True, slots=True)
class KvSplit:
    """The division of an engine's KV between its ranks."""

    width: int
    """Number of ranks in the tensor-parallel group."""
    kv_heads: int
    """Number of KV heads of the whole model; ignored for a latent."""
    is_latent: bool = False
    """True if the model uses MLA, where each rank holds the whole latent."""
    has_states: bool = False
    """True if the model has state-space layers, whose states move whole."""
    order: str = ""
    """The order of a block's dimensions in memory, by vLLM's name; empty if unknown."""
    context_width: int = 1
    """The number of ranks that divide the tokens of a sequence between them."""
    over_nixl: bool = True
    """True if NIXL's connector alone moves the blocks."""


def width_class(split: KvSplit) -> str:
    """Return the name of the class of engines that can read each other's KV; names of singletons state the reason."""
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
