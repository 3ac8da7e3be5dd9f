"""Static split: a fixed number of workers on each side.

This is what deployments without a planner run, including vLLM's and Dynamo's own examples of disaggregated serving.
Every split of n workers is a rival; the best of them in hindsight is the one to beat.
"""

from collections.abc import Sequence

from libs.lab.rivals.pools import decode_pool, emptiest, prefill_pool, soonest, split_roles
from libs.lab.rivals.port import Rival, RivalRouter, RivalSetting, SeenRequest, SeenWorker


class SplitRouter:
    """A router of prompts by least predicted backlog and of decodes by fewest sequences."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the prefill worker with the earliest first token."""
        return soonest(request, prefill_pool(workers)).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the decode worker with the fewest sequences, then the most free KV."""
        return emptiest(decode_pool(workers)).index


def static_split(prefill: int, decode: int) -> Rival:
    """Return the rival with `prefill` workers in role prefill and `decode` workers that only decode."""

    def router(cluster: RivalSetting) -> RivalRouter:
        return SplitRouter()

    return Rival(
        name=f"static:{prefill}:{decode}",
        source="disaggregated serving without a planner; the routing is least predicted backlog, least sequences",
        simplified=("Its router predicts with the step-time model, which is more than such systems know.",),
        first_roles=lambda cluster: split_roles(cluster, prefill, decode),
        router=router,
    )
