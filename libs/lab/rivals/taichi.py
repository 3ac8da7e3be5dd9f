"""TaiChi: prefill-heavy and decode-heavy instances, chosen by the length of the prompt.

Wang et al., "Prefill-Decode Aggregation or Disaggregation? Unifying Both for Goodput-Optimized LLM Serving", 2025,
arXiv 2508.01989v1: three sliders (the ratio of both kinds and the chunk size of each), length-aware prefill
scheduling and flowing decode scheduling.
"""

from collections.abc import Sequence
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.pools import (
    decode_pool,
    emptiest,
    first_token_ns,
    fits,
    halves,
    prefill_pool,
    soonest,
    split_roles,
)
from libs.lab.rivals.port import Move, Rival, RivalRouter, RivalSetting, SeenRequest, SeenWorker

DECODE_HEAVY_BUDGET_TOKENS: Final = 256


class TaiChiRouter:
    """A length-aware router: prompts that decode-heavy instances compute in time stay off the prefill-heavy ones."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the earliest decode-heavy instance if it is in time, else the earliest prefill-heavy one."""
        able = [each for each in decode_pool(workers) if each.budget_tokens and fits(request, each)]
        in_time = [each for each in able if first_token_ns(request, each) <= request.slo.ttft_ns]
        return soonest(request, in_time or prefill_pool(workers)).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the source if it decodes, else the decode-heavy instance with the fewest sequences."""
        pool = decode_pool(workers)
        return source if any(each.index == source for each in pool) else emptiest(pool).index


def taichi(prefill: int = 0, decode: int = 0, budget_tokens: int = DECODE_HEAVY_BUDGET_TOKENS) -> Rival:
    """Return TaiChi with this split, or an even one. `budget_tokens` is that of decode-heavy instances."""
    if budget_tokens < 1:
        raise InvalidRequest(f"decode-heavy instances compute at least one prompt token a step, not {budget_tokens}")

    def router(cluster: RivalSetting) -> RivalRouter:
        return TaiChiRouter()

    def first_roles(cluster: RivalSetting) -> list[Move]:
        counts = (prefill, decode) if prefill or decode else halves(cluster)
        return split_roles(cluster, *counts, budget_tokens=budget_tokens)

    split = f":{prefill}:{decode}:{budget_tokens}" if prefill or decode else ""
    return Rival(
        name=f"taichi{split}",
        source="arXiv 2508.01989v1 (Wang et al., 2025): abstract, introduction and published summaries; no code read",
        simplified=(
            "Flowing decode scheduling is missing: running sequences do not move to prefill-heavy instances when "
            "memory runs short, nor back before they break their TPOT, because this port moves no running sequence.",
            "Prefill-heavy instances therefore decode nothing.",
            "The order of preference in length-aware scheduling (decode-heavy while in time) is rebuilt from the "
            "paper's description, not from its algorithm.",
            "Chunk sizes stay as set; the paper tunes its three sliders to the service level beforehand.",
        ),
        first_roles=first_roles,
        router=router,
    )
