"""Static split: a fixed number of workers on each side, for ever.

What deployments without a planner run, vLLM's and Dynamo's own examples of disaggregated serving among them. Every
split of n workers is a rival; the best of them in hindsight is the one to beat.
"""

from collections.abc import Sequence

from libs.lab.rivals.pools import decode_pool, emptiest, prefill_pool, soonest, split_roles
from libs.lab.rivals.port import Rival, RivalRouter, RivalSetting, SeenRequest, SeenWorker


class SplitRouter:
    """Prompts to the least predicted backlog, decodes to the fewest sequences."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """The prefill worker with the soonest first token."""
        return soonest(request, prefill_pool(workers)).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """The decode worker with the fewest sequences, then the most free KV."""
        return emptiest(decode_pool(workers)).index


def static_split(prefill: int, decode: int) -> Rival:
    """`prefill` workers in role prefill, `decode` workers that decode only."""

    def router(cluster: RivalSetting) -> RivalRouter:
        return SplitRouter()

    return Rival(
        name=f"static:{prefill}:{decode}",
        source="disaggregated serving without a planner; the routing is least predicted backlog, least sequences",
        simplified=("Its router predicts with the step-time model, which is more than such systems know.",),
        first_roles=lambda cluster: split_roles(cluster, prefill, decode),
        router=router,
    )
