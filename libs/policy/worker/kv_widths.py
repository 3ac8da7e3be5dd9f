"""The tensor-parallel widths of prefill and decode that can read each other's KV over NIXL.

vLLM 0.32 reads between widths of which one divides the other. A rank of the wider side has a part of the heads, or
all of a latent (MLA). Reading a part needs blocks that hold one head's tokens together, and heads that are held
once: vLLM reads heads held by several ranks only towards wider engines, and workers here change sides. So widths
fall into named classes whose members can all read each other.
"""

from dataclasses import dataclass

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
    """Whether the model uses MLA, where each rank holds the whole latent."""
    has_states: bool = False
    """Whether the model has state-space layers."""
    order: str = ""
    """The order of a block's dimensions in memory, by vLLM's name; empty if unknown."""
    context_width: int = 1
    """Number of ranks that divide the tokens of a sequence between them."""
    over_nixl: bool = True
    """Whether NIXL's connector alone moves blocks."""


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
