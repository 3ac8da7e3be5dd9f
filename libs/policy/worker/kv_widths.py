"""Which tensor-parallel widths of prefill and decode can read each other's KV over NIXL. Pure.

vLLM 0.32 reads between widths of which one divides the other. A rank of the wider side has a part of the heads, or all
of a latent (MLA). A part can be read where a block holds one head's tokens together, and where each head is held once:
vLLM reads heads that several ranks hold only towards wider engines, and workers here change sides. So widths fall into
classes of which all can read each other, and a class has a name.
"""

from dataclasses import dataclass

HEADS_APART = "HNC"
"""The end of vLLM's name of an order in which a block holds the tokens of one head, then those of the next."""


@dataclass(frozen=True, slots=True)
class KvSplit:
    """How an engine's ranks divide its KV."""

    width: int
    """Ranks of the tensor-parallel group."""
    kv_heads: int
    """Of the whole model; of no meaning for a latent."""
    is_latent: bool = False
    """MLA: each rank holds all of it."""
    has_states: bool = False
    """State-space layers are among the model's."""
    order: str = ""
    """Of a block's dimensions in memory, by vLLM's name; empty: not known."""
    context_width: int = 1
    """Ranks that divide the tokens of a sequence between them."""
    over_nixl: bool = True
    """Blocks are moved by NIXL's connector alone."""


def width_class(split: KvSplit) -> str:
    """Equal for engines whose widths, as far as those decide, can read each other's KV; else it names why not."""
    apart = _apart(split)
    return f"tp{split.width} ({apart})" if apart else "tp2^n"


def _apart(split: KvSplit) -> str:
    """Why an engine exchanges KV with those of its own width alone; empty: it does with others."""
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
